"""Trains several depths with several budgets, and fits a scaling law.

    jaxlm scaling --config_path scaling.yaml

The configuration is that of a run with a preset, and a section `scaling` with depths and budgets. Each member is an ordinary
run. The same command continues a study that was stopped: members that have finished are not trained again.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import write_text
from jaxlm.core.safe_io import atomic_file
from jaxlm.engine.checkpoint.lease import LeaseCheck, locked_file
from jaxlm.plan.load_config import load_source
from jaxlm.session.exit_codes import EXIT_INTERRUPTED, command
from jaxlm.systems.nanochat.scaling_law import fit_law, law_as_json, scaling_plot
from jaxlm.systems.nanochat.scaling_members import (
    Member,
    MemberResult,
    ScalingConfig,
    ScalingRunConfig,
    law_table,
    member_table,
    plan_study,
    plan_table,
    train_here,
    train_on_ray,
)

_LOCK = ".lock"
_SIGNALED = 128  # exit codes above are a signal's


@command
def main(arguments: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    source, stem = load_source(arguments, "jaxlm scaling", ScalingRunConfig)
    scaling, members = plan_study(source, stem)
    is_dry = bool(source.tree.get("dry_run"))
    with contextlib.nullcontext(lambda: None) if is_dry else _locked(Path(scaling.output_dir)) as check_lease:
        results = [result for member in members if (result := member.result()) is not None]
        finished = {result.name for result in results}
        print(plan_table(members, finished), flush=True)
        if is_dry:
            return 0
        code = _train([member for member in members if member.name not in finished], scaling, results, check_lease)
        if not code or results:
            check_lease()
            print(_write(scaling, results))
        return code


def _locked(folder: Path) -> contextlib.AbstractContextManager[LeaseCheck]:
    """Raises `ConfigError` if a study is at work in the folder: both would write the same results."""
    unwritable = functools.partial(_unwritable, folder)
    return locked_file(folder / _LOCK, f"write to {folder.absolute()}", unwritable, _held_by)


def _held_by(holder: object, what: str) -> ConfigError:
    return ConfigError(
        f"a study is already at work here ({holder}): both would {what}. Wait until it ends, stop it, or set another"
        " scaling.output_dir"
    )


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"scaling.output_dir: {folder} cannot be written ({error.strerror}). Set it to a writable folder"
    )


def _train(
    members: Sequence[Member], scaling: ScalingConfig, results: list[MemberResult], check_lease: LeaseCheck
) -> int:
    """Trains members and adds their results. Returns the exit code: that of the first member that does not finish.

    A member that fails does not keep others from training. One that a signal ended is the last.
    """
    if not members:
        return 0
    for member in members:
        member.write()
    ended = train_here(members) if scaling.ray is None else train_on_ray(members, scaling.ray, print)
    try:
        with contextlib.closing(ended):
            return _collect(ended, len(members), scaling, results, check_lease)
    except KeyboardInterrupt:
        print(
            f"interrupted: {len(results)} of the study's members have finished. Members that were training go on from their"
            " newest checkpoints: the same jaxlm scaling command continues the study",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED


def _collect(
    ended: Iterable[tuple[Member, int]],
    num_members: int,
    scaling: ScalingConfig,
    results: list[MemberResult],
    check_lease: LeaseCheck,
) -> int:
    failed = 0
    for number, (member, code) in enumerate(ended, 1):
        check_lease()
        if code:
            print(
                f"{member.name} ended with exit code {code}. To train it alone: jaxlm train --config_path"
                f" {member.config_path}. The same jaxlm scaling command continues the study",
                file=sys.stderr,
            )
            failed = failed or code
            if code > _SIGNALED:
                break
            continue
        results.append(member.measure())
        print(f"{member.name}: {scaling.metric} {results[-1].value:.4f} ({number} of {num_members})", flush=True)
        _write(scaling, results)
    return failed


def _write(scaling: ScalingConfig, results: Sequence[MemberResult]) -> str:
    """Writes `scaling.json`, `scaling.md` and `scaling.png`, and returns the tables."""
    results = sorted(results, key=lambda result: (result.budget, result.depth))
    law = fit_law([result.point for result in results])
    folder = Path(scaling.output_dir)
    content = {
        "metric": scaling.metric,
        "members": [asdict(result) for result in results],
        "law": law_as_json(law),
    }
    text = "\n\n".join([member_table(results), law_table(law)])
    try:
        with atomic_file(folder / "scaling.json") as path:
            write_text(path, json.dumps(content, indent=1) + "\n")
        with atomic_file(folder / "scaling.md") as path:
            write_text(path, f"# Scaling law\n\n{text}\n\n![Losses and optima](scaling.png)\n")
        with atomic_file(folder / "scaling.png") as path:
            scaling_plot([result.point for result in results], law, path, scaling.metric)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return f"{text}\n\nwritten to {folder}: scaling.json, scaling.md, scaling.png"


if __name__ == "__main__":
    sys.exit(main())
