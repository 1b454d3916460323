"""Runs the real command in separate processes, on a small corpus."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.end_to_end.fork_server import READ_AT_START, fork_server
from tests.ports import reserved_port
from tests.xla_flags import flags_for

REPOSITORY = Path(__file__).parents[2]

CONFIG = """
data:
  train_urls: [{corpus}]
  validation_urls: [{held_out}]
  cache_dir: {cache}
  vocab_size: 300
model:
  type: llama
  seq_len: 32
  hidden_dim: 32
  intermediate_dim: 64
  num_layers: 2
  num_heads: 4
  num_kv_heads: 2
trainer:
  num_train_steps: {num_steps}
  train_batch_size: 16
  steps_per_eval: 9
  max_eval_batches: 2
  log_dir: logs
  compilation_cache_dir: {cache}/xla
  checkpointer: {{base_path: checkpoints, save_interval: 1000s, keep: [{{every: 5}}]}}
optimizer: {{learning_rate: 1.0e-2, warmup: 2}}
"""


class Finished(NamedTuple):
    """The result of a finished command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Workplace:
    """A folder with a configuration, in which commands run."""

    folder: Path
    cache: Path
    corpus: Path
    devices: int = 1

    def write(self, extra: str = "", name: str = "run", num_steps: int = 24) -> Path:
        """The small configuration, with more YAML appended. Args: num_steps: of all phases together."""
        files = {"corpus": self.corpus / "train", "held_out": self.corpus / "validation", "cache": self.cache}
        text = CONFIG.format(**files, num_steps=num_steps)
        path = self.folder / f"{name}.yaml"
        path.write_text(text + textwrap.dedent(extra))
        return path

    def write_averaged(self) -> None:
        """The small configuration with an average and a guard, which have their own state, and with two sources that are
        evaluated as a whole."""
        text, held_out = self.write().read_text(), self.corpus / "validation"
        for old, new in {
            f"[{held_out}]": f"[{held_out}/bisect.py, {held_out}/heapq.py]",
            "max_eval_batches: 2": "max_eval_batches: null",
            "trainer:\n": "trainer:\n  model_averaging: {type: ema, beta: 0.7}\n",
            "optimizer: {": "optimizer: {skip_bad_steps: 24, ",
        }.items():
            text = text.replace(old, new)
        (self.folder / "run.yaml").write_text(text)

    def start(self, *arguments: str, module: str = "jaxlm.train", **environment: str) -> Any:
        """Starts a command. Returns a `subprocess.Popen`, or a process with the same methods."""
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags_for(self.devices),
            "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
            **environment,
        }
        if not any(name.startswith(READ_AT_START) for name in environment):
            return fork_server().start(module, arguments, self.folder, env)
        command = [sys.executable, "-m", module, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=env, **pipes)

    def start_all(self, processes: int, *arguments: str, module: str = "jaxlm.train", **environment: str) -> list[Any]:
        """Starts the command as one run of several processes."""
        if processes == 1:
            return [self.start(*arguments, module=module, **environment)]
        return self.start_each([arguments] * processes, module=module, **environment)

    def start_each(
        self,
        arguments: Sequence[Sequence[str]],
        *,
        module: str = "jaxlm.train",
        variables: Mapping[int, Mapping[str, str]] | None = None,
        **environment: str,
    ) -> list[Any]:
        """Starts one run of several processes, each with its own arguments. Args: variables: process -> its own."""
        where = "--trainer.distributed."
        address = f"127.0.0.1:{reserved_port()}"
        common = (f"{where}coordinator_address", address, f"{where}num_processes", str(len(arguments)))
        return [
            self.start(
                *(*process_arguments, *common, f"{where}process_id", str(number)),
                module=module,
                **(environment | dict((variables or {}).get(number, {}))),
            )
            for number, process_arguments in enumerate(arguments)
        ]

    def run(self, *arguments: str, module: str = "jaxlm.train", **environment: str) -> Finished:
        """Runs a command to its end."""
        return end_of(self.start(*arguments, module=module, **environment))

    def finish(self, *arguments: str, **environment: str) -> Finished:
        """Runs a command that succeeds."""
        result = self.run(*arguments, **environment)
        assert result.code == 0, result.err
        return result

    def die(self, *arguments: str, at: str, module: str = "tests.end_to_end.dies", **environment: str) -> Finished:
        """Runs the training until it kills itself. Args: at: a key of `PLACES` in the module, or the number of a step."""
        result = self.run(*arguments, module=module, JAXLM_TEST_DIES_AT=at, **environment)
        assert result.code == -signal.SIGKILL, (at, result.err)
        return result

    def stop(self, *arguments: str, at: int) -> Finished:
        """Runs the training until SIGTERM comes at a step, after which it saves."""
        signaled = {"module": "tests.end_to_end.signaled", "JAXLM_TEST_SIGNAL": f"{int(signal.SIGTERM)}:0:{at}"}
        result = self.run(*arguments, **signaled)
        assert result.code == 128 + signal.SIGTERM, result.err
        return result

    def run_all(
        self, processes: int, *arguments: str, module: str = "jaxlm.train", **environment: str
    ) -> list[Finished]:
        """Runs the command to its end as one run of several processes."""
        return [end_of(process) for process in self.start_all(processes, *arguments, module=module, **environment)]

    def records(self, run_id: str = "run") -> list[dict[str, Any]]:
        """All records of metrics, also those that a later attempt supersedes."""
        lines = (self.folder / "logs" / run_id / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def numbers(self) -> list[dict[str, Any]]:
        """All records of the run without times and rates."""
        return [{k: v for k, v in record.items() if not k.startswith("throughput/")} for record in self.records()]

    def losses(self, run_id: str = "run") -> dict[int, str]:
        """Step -> training loss, in hexadecimal, "nan" if it is not finite; fails on a step that is logged twice."""
        losses: dict[int, str] = {}
        for record in self.records(run_id):
            if "train/loss" in record:
                assert record["step"] not in losses
                losses[record["step"]] = "nan" if record["train/loss"] is None else float(record["train/loss"]).hex()
        return losses

    def checkpoints(self, run_id: str = "run") -> list[str]:
        """Names of everything in the run's checkpoint folder."""
        folder = self.folder / "checkpoints" / run_id
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def digest(self, checkpoint: str, run_id: str = "run") -> dict[str, str]:
        """Path of each array in a checkpoint -> hash of its bytes."""
        return digest_of_arrays(str(self.folder / "checkpoints" / run_id / checkpoint))


def end_of(process: Any) -> Finished:
    """Waits for the end of a process that `Workplace.start` has started."""
    out, err = process.communicate(timeout=500)
    return Finished(process.returncode, out, err)


def check_close(actual: Mapping[int, str], expected: Mapping[int, str], rel: float = 1e-5) -> None:
    """Fails unless two runs have the same losses within rounding. Args: actual, expected: as of `Workplace.losses`."""
    ours, theirs = ({step: float.fromhex(loss) for step, loss in losses.items()} for losses in (actual, expected))
    assert ours == pytest.approx(theirs, rel=rel)


def digest_of_arrays(checkpoint: str) -> dict[str, str]:
    """Path of each array in a checkpoint, which is at a path or URL -> hash of its bytes."""
    import orbax.checkpoint as ocp

    folder = f"{checkpoint}/state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        paths = reader.metadata(folder).item_metadata.tree
        as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths}
        arrays = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return {p: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest() for p, a in arrays.items()}


@dataclass(frozen=True)
class Uninterrupted:
    """An uninterrupted run, with which other runs are compared.

    Attributes:
        place: its folder.
        losses: step -> training loss.
        digest: path -> hash of each array in its last checkpoint.
    """

    place: Workplace
    losses: dict[int, str]
    digest: dict[str, str]


def make_corpus(folder: Path) -> None:
    """A few modules of the standard library, some for training and some held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for split, names in {
        "train": ["argparse", "ast", "inspect", "textwrap"],
        "validation": ["bisect", "heapq"],
    }.items():
        (folder / split).mkdir(parents=True)
        for name in names:
            (folder / split / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
