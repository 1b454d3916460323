"""Weights & Biases."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.types import Histogram
from jaxlm.observe.trackers import environment
from jaxlm.observe.trackers.base import RunInfo, Tracker, TrackerConfig

_INIT_TIMEOUT_S = 30.0
_FORBIDDEN_IN_ID = "/\\#?%:"
_DUMP_FLAG = re.compile(r"--xla_dump_to=(\S+)")
# Of a folder that is named outright; of a repository it is what git knows.
_CODE_SUFFIXES = (".py", ".yaml", ".yml", ".toml", ".sh", ".md")


class NoKeyError(Exception):
    """Nobody is logged in to Weights & Biases."""


class TakenIdError(Exception):
    """The run begins anew, and wandb has records of another one under its id."""


@TrackerConfig.register_subclass("wandb")
@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases.

    Attributes:
        entity: user or team; null takes your default.
        project: null takes wandb's default.
        name: shown for the run; null takes the run's id.
        tags: of the run.
        id: by which a run that is started again goes on; null takes the run's id.
        group: runs that are shown together.
        mode: `online`, `offline` (files only, to be sent with `wandb sync`) or `disabled`; null takes WANDB_MODE, or
            else online.
        resume: what to do where the id exists: `allow` goes on; also `must`, `never`, `auto`.
        save_code: keep the code: true takes the git repository of the main script, as it is now and as a patch of its
            commit; a text names a folder.
        save_xla_dumps: keep what XLA dumped, as an artifact at the end; needs `--xla_dump_to=FOLDER` in XLA_FLAGS.
    """

    entity: str | None = None
    project: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    id: str | None = None
    group: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    resume: Literal["allow", "must", "never", "auto"] = "allow"
    save_code: bool | str = True
    save_xla_dumps: bool = False

    def check(self) -> None:
        """Raises `ConfigError` for an impossible id, a code folder that is not there, dumps that XLA does not make."""
        if self.id is not None and (not self.id or any(c in self.id for c in _FORBIDDEN_IN_ID)):
            raise ConfigError(f"trainer.tracker (wandb): id: '{self.id}' given; it may hold none of {_FORBIDDEN_IN_ID}")
        if isinstance(self.save_code, str) and not Path(self.save_code).is_dir():
            raise ConfigError(
                f"trainer.tracker (wandb): save_code: '{self.save_code}' is no folder. true takes the repository"
            )
        if self.save_xla_dumps and xla_dump_folder() is None:
            raise ConfigError(
                "trainer.tracker (wandb): save_xla_dumps: XLA dumps nothing. Start with"
                " XLA_FLAGS='--xla_dump_to=FOLDER --xla_dump_hlo_pass_re=.*', or leave it out"
            )

    def open(self, run: RunInfo) -> Tracker:
        """Begins the run, or goes on with it where its id exists.

        Raises:
            NoKeyError: it is to be online and there is no key. Nobody is asked for one: that would hold up the run.
            TakenIdError: the run is new and its id is not: wandb would drop every step that it has already.
        """
        import wandb

        mode = self.mode or os.environ.get("WANDB_MODE", "online")
        if mode not in ("offline", "disabled", "dryrun") and not wandb.login(prompt=False, verify=False):
            raise NoKeyError("no key. Run `wandb login` or set WANDB_API_KEY, or take mode: offline")
        # What the environment says goes before what is said here, but not in wandb itself.
        timeout = float(os.environ.get("WANDB_INIT_TIMEOUT", _INIT_TIMEOUT_S))
        handle = wandb.init(
            entity=self.entity,
            project=self.project,
            name=self.name or run.run_id,
            tags=self.tags or None,
            id=self.id or run.run_id,
            group=self.group,
            mode=self.mode,
            resume=self.resume,
            settings=wandb.Settings(console="off", quiet=True, init_timeout=timeout),
        )
        if run.is_new and (known := handle.step) > 0:
            handle.finish()
            raise TakenIdError(
                f"the id '{handle.id}' has {known} steps of an earlier run there, and this one begins anew. Name another"
                " (trainer.tracker.id), or delete that run; nothing of this run is sent"
            )
        handle.config.update({**run.config, "git_commit": environment.commit()}, allow_val_change=True)
        handle.summary.update(dict(run.summary))
        self._log_files(handle, run)
        return WandbTracker(handle, xla_dump_folder() if self.save_xla_dumps else None)

    def _log_files(self, handle: Any, run: RunInfo) -> None:
        import wandb

        about = wandb.Artifact(artifact_name(run.run_id, "run"), type="run")
        texts = {"config.yaml": run.config_text, "requirements.txt": "\n".join(environment.packages())}
        if self.save_code and (patch := environment.changes()):
            texts["changes.patch"] = patch
        for name, text in texts.items():
            with about.new_file(name) as file:
                file.write(text)
        handle.log_artifact(about)
        if isinstance(self.save_code, str):
            handle.log_code(self.save_code, include_fn=lambda path: path.endswith(_CODE_SUFFIXES))
        elif self.save_code and (root := environment.repository()) is not None:
            known = environment.tracked_files(root)
            handle.log_code(str(root), include_fn=lambda path: Path(path).resolve() in known)


class WandbTracker:
    """Hands the numbers to wandb's own process."""

    def __init__(self, handle: Any, dumps: Path | None):
        """Args: handle: an open wandb run. dumps: a folder to keep at the end."""
        self._handle = handle
        self._first = (
            handle.step
        )  # asked once: each time it is a question to wandb's process, which costs what a record does
        self._dumps = dumps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records of steps that wandb has already are left out: a run that goes on repeats them to the last bit."""
        if step >= self._first:
            self._handle.log(dict(metrics), step=step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """One `wandb.Histogram` for each array."""
        import wandb

        found = {name: (np.asarray(h.counts), np.asarray(h.edges)) for name, h in histograms.items() if not h.is_empty}
        if step >= self._first:
            self._handle.log({name: wandb.Histogram(np_histogram=pair) for name, pair in found.items()}, step=step)

    def flush(self) -> None:
        """Nothing: what was logged is in wandb's own process already."""

    def close(self) -> None:
        """Keeps the dumps where that was asked for, and waits until everything has been sent or written."""
        if self._dumps is not None and self._dumps.is_dir():
            import wandb

            artifact = wandb.Artifact(artifact_name(self._handle.id, "xla"), type="xla_dumps")
            artifact.add_dir(str(self._dumps))
            self._handle.log_artifact(artifact)
        self._handle.finish()


def xla_dump_folder() -> Path | None:
    """The folder that XLA_FLAGS has XLA dump its programs to; None where it does not."""
    found = _DUMP_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return Path(found[-1]) if found else None


def artifact_name(run_id: str, what: str) -> str:
    """`<run id>-<what>` in the letters that wandb allows."""
    return re.sub(r"[^\w.-]", "-", f"{run_id}-{what}")
