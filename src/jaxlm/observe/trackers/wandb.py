"""The Weights & Biases tracker."""

import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import redacted, redacted_bytes
from jaxlm.core.safe_io import read_bytes
from jaxlm.core.values.logged import Completion, Histogram, Sample
from jaxlm.observe import environment
from jaxlm.observe.trackers.base import FilesError, ForwardTracker, RunInfo, Tracker, TrackerConfig
from jaxlm.reading.choices import choice

_INIT_TIMEOUT_S = 30.0
_FORBIDDEN_IN_ID = "/\\#?%:"
_DUMP_FLAG = re.compile(r"--xla_dump_to=(\S+)")
_FILES_TIMEOUT_S = 20.0


class NoKeyError(Exception):
    """There is no API key for Weights & Biases."""


class TakenIdError(Exception):
    """The run starts from scratch, but wandb already has records of another run under its ID."""


@choice(TrackerConfig, "wandb")
class WandbConfig(TrackerConfig):
    """Weights & Biases.

    Attributes:
        entity: wandb user or team; null uses your default entity.
        project: wandb project; null uses wandb's default.
        name: display name of the run; null uses the run ID.
        tags: tags of the run.
        id: wandb run ID, by which a restarted run resumes; null uses the run ID.
        group: group that the run is shown in; null means no group.
        mode: `online`, `offline` (write files that you upload later with `wandb sync`) or `disabled`; null uses WANDB_MODE,
            or `online` if that is not set.
        resume: what wandb does if the ID already exists: `allow` resumes the run; `must`, `never` and `auto` are wandb's
            other modes.
        save_code: upload the code. True uploads the files that git tracks in the program's repository and a patch of
            uncommitted changes or, without git, the Python files of the program's folder; a string does so for that folder;
            false uploads nothing. Files above 2 MiB, and all after 2,000 files or 32 MiB, are left out and counted in the
            summary.
        save_xla_dumps: upload XLA's dumps as an artifact at the end of the run. Requires `--xla_dump_to=FOLDER` in
            XLA_FLAGS.
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
        if self.id is not None and (not self.id or any(c in self.id for c in _FORBIDDEN_IN_ID)):
            raise ConfigError(
                f"trainer.tracker (wandb): id: '{self.id}' given; it must not be empty or contain any of {_FORBIDDEN_IN_ID}"
            )
        if isinstance(self.save_code, str) and not Path(self.save_code).is_dir():
            raise ConfigError(
                f"trainer.tracker (wandb): save_code: '{self.save_code}' is not a folder. Name an existing folder, or set"
                " true to upload the git repository"
            )
        if self.save_xla_dumps and xla_dump_folder() is None:
            raise ConfigError(
                "trainer.tracker (wandb): save_xla_dumps: true given, but XLA writes no dumps. Start the run with"
                " XLA_FLAGS='--xla_dump_to=FOLDER --xla_dump_hlo_pass_re=.*', or set save_xla_dumps to false"
            )

    def how_to_open(self, run_id: str) -> str | None:
        mode, name = self._mode(), self.id or run_id
        if mode in ("offline", "dryrun"):
            folder = Path(os.environ.get("WANDB_DIR", "."), "wandb")
            return f"wandb sync {folder}/offline-run-*-{name}"
        place = "/".join(filter(None, [self.entity, self.project])) or "your default project"
        return f"wandb.ai: run '{name}' of {place}" if mode == "online" else None

    def _mode(self) -> str:
        return self.mode or os.environ.get("WANDB_MODE", "online")

    def open(self, run: RunInfo) -> Tracker:
        """Starts the wandb run, or resumes it if its ID exists.

        Raises:
            NoKeyError: the mode is online and there is no API key. wandb must not prompt for one, which would block the run.
            TakenIdError: the run is new, but its ID is taken: wandb would drop every step that it already has.
        """
        import wandb

        if self._mode() not in ("offline", "disabled", "dryrun") and not wandb.login(prompt=False, verify=False):
            raise NoKeyError("no API key. Run `wandb login`, set WANDB_API_KEY, or set mode: offline")
        # The environment variable takes precedence here; in wandb itself, the setting would.
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
        if run.is_new and (num_known_steps := handle.step) > 0:
            handle.finish()
            raise TakenIdError(
                f"wandb already has {num_known_steps} steps of another run with the ID '{handle.id}', but this run starts"
                " from scratch, so nothing is sent. Set another trainer.tracker.id, or delete the wandb run"
            )
        handle.config.update(dict(run.config), allow_val_change=True)
        handle.summary.update(dict(run.summary))
        files = FilesThread(lambda: self._log_files(handle, run))
        return WandbTracker(handle, xla_dump_folder() if self.save_xla_dumps else None, run.abandoned_steps, files)

    def _log_files(self, handle: Any, run: RunInfo) -> None:
        import wandb

        handle.config.update({"git_commit": environment.commit()}, allow_val_change=True)
        artifact = wandb.Artifact(artifact_name(run.run_id, "run"), type="run")
        texts = {"config.yaml": run.config_text, "requirements.txt": "\n".join(environment.packages())}
        if self.save_code and (patch := environment.changes()):
            texts["changes.patch"] = redacted(patch)
        for name, text in texts.items():
            with artifact.new_file(name) as file:
                file.write(text)
        handle.log_artifact(artifact)
        if self.save_code:
            folder = Path(self.save_code) if isinstance(self.save_code, str) else environment.repository()
            _log_code(handle, folder or environment.program_folder())


def _log_code(handle: Any, folder: Path) -> None:
    files, num_left_out = environment.code_files(folder)
    if num_left_out:
        handle.summary.update({"code_files_left_out": num_left_out})
    if not files:
        return
    # wandb walks the folder that it is given, and everything in it: it gets one that has nothing else.
    with tempfile.TemporaryDirectory() as copies:
        for path in files:
            copy = Path(copies, path.relative_to(folder))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(redacted_bytes(read_bytes(path)))
        handle.log_code(copies, include_fn=lambda _: True, exclude_fn=lambda _: False)


class FilesThread:
    """Logs files in a thread of its own: git, a slow disk and wandb may take a minute, which records do not wait for."""

    def __init__(self, log_files: Callable[[], None]):
        self._log_files = log_files
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="wandb files", daemon=True)
        self._thread.start()

    def wait(self) -> FilesError | None:
        """Waits until the files are logged, but not forever. Returns why they are not."""
        self._thread.join(_FILES_TIMEOUT_S)
        if self._thread.is_alive():
            return FilesError(f"the code and the packages were not logged within {_FILES_TIMEOUT_S:g} s")
        return self._failure and FilesError(f"the code and the packages were not logged: {self._failure!r}")

    def _work(self) -> None:
        try:
            self._log_files()
        except Exception as failure:  # third-party code
            self._failure = failure


class WandbTracker(ForwardTracker):
    """Passes metrics to wandb, which sends them from a process of its own. That has every record, so nothing is flushed."""

    def __init__(self, handle: Any, xla_dumps: Path | None, abandoned_steps: int = 0, files: FilesThread | None = None):
        """Args:
        handle: an open wandb run.
        xla_dumps: a folder to upload at the end.
        abandoned_steps: steps lost by going back, which wandb cannot remove.
        files: logs the run's files; None if it has none.
        """
        # The step is read once: each read is a request to wandb's process, as expensive as a record.
        super().__init__(handle, handle.step, abandoned_steps)
        self._files, self._xla_dumps = files, xla_dumps

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        import wandb

        pairs = {name: (np.asarray(h.counts), np.asarray(h.edges)) for name, h in histograms.items() if not h.is_empty}
        self.log(step, {name: wandb.Histogram(np_histogram=pair) for name, pair in pairs.items()})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs a table for the weights, and one for each of their averages."""
        import wandb

        for name in dict.fromkeys(sample.name for sample in samples):
            rows: list[Any] = [[step, sample.prompt, sample.text] for sample in samples if sample.name == name]
            self.log(step, {f"{name}/samples": wandb.Table(["step", "prompt", "text"], rows)})

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        import wandb

        for name in dict.fromkeys(one.name for one in completions):
            group = [one for one in completions if one.name == name]
            names = list(group[0].rewards)
            rows: list[Any] = [
                [step, c.prompt, c.completion, c.reward, *map(c.rewards.get, names), c.advantage, c.finished]
                for c in group
            ]
            columns: list[Any] = ["step", "prompt", "completion", "reward", *names, "advantage", "finished"]
            self.log(step, {f"{name}/completions": wandb.Table(columns, rows)})

    def close(self) -> None:
        """Uploads the XLA dumps if configured, and waits until everything is sent or written.

        Raises:
            FilesError: everything else is.
        """
        problem = self._files.wait() if self._files else None
        if self._xla_dumps is not None and self._xla_dumps.is_dir():
            import wandb

            artifact = wandb.Artifact(artifact_name(self._handle.id, "xla"), type="xla_dumps")
            artifact.add_dir(str(self._xla_dumps))
            self._handle.log_artifact(artifact)
        self._handle.finish()
        if problem is not None:
            raise problem


def xla_dump_folder() -> Path | None:
    """The folder of `--xla_dump_to` in XLA_FLAGS; None if the flag is not set."""
    folders = _DUMP_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return Path(folders[-1]) if folders else None


def artifact_name(run_id: str, suffix: str) -> str:
    """`<run id>-<suffix>`, with characters that wandb does not allow replaced by `-`."""
    return re.sub(r"[^\w.-]", "-", f"{run_id}-{suffix}")
