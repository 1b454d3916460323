"""Compares jaxlm with its peers on a CPU: same model, data and batch, in the same seconds.

    python benchmarks/cpu_peers.py
    python benchmarks/cpu_peers.py --peers all --minutes 40
    python benchmarks/cpu_peers.py --tuned          # also with the options that were tuned (see benchmarks/peers/gpt2.yaml)
    python benchmarks/cpu_peers.py --starts 4       # also the time to the first step
    python3.12 benchmarks/cpu_peers.py --peers jaxlm-bf16,torch-eager-bf16,torch-compile-bf16,jaxlm

Peers with -bf16 keep their weights in float32 and compute in bfloat16: jaxlm with `mp: p=f32,c=bfloat16`, torch under
autocast. jax 0.12, for Python 3.12, uses a CPU's instructions for it; 0.10 does not.

All peers stay alive, each in its own process, and wait while another takes a few steps. In each round, every peer has its
turn, in random order. Reports for each peer the median of the rounds' tokens/s and how many times as fast jaxlm is: the
geometric mean of the rounds' ratios, with a 95 % interval by Student's t on their logarithms. Also reports the processor,
what others took of it during the measurements, how fast a matrix product was before and after each of them, and which share
of the FLOP/s of the fastest product in its dtype the whole step reaches.

Makes a virtual environment for each kind of peer once (under benchmarks/.venvs), or uses this Python for all (`--here`). The
last line printed is JSON.
"""

import argparse
import compileall
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from machine import CpuTicks, Use, resident_bytes, this_processor, ticks_of
from peer_report import Started, Turn, report
from processes import AnsweringProcess, PeerFailedError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CACHE = "{cache}"  # in a command: a folder for compiled programs, for peers that can cache them

TORCH = ["torch==2.13.0", "numpy", "psutil"]
ENVIRONMENTS = {
    "jaxlm": ["-e", str(ROOT), "psutil"],
    "torch": TORCH,
    "hf": [*TORCH, "transformers>=5.20", "accelerate>=1.1"],
    "trl": [*TORCH, "trl==1.16.0", "peft", "transformers>=5.20", "accelerate>=1.1", "datasets"],
    # levanter imports gitpython and chex but does not require them.
    "levanter": ["levanter==1.2.dev1644", "gitpython", "chex", "psutil"],
}
_START_S, _TURN_S = 900, 300  # longer than any start and any turn, on a slow machine
_SETTLE_S = 0.3  # threads of the peer before still spin for work


@dataclass(frozen=True)
class Peer:
    """One way to train the model. `command` is a script of benchmarks/peers with its arguments."""

    environment: str
    command: tuple[str, ...]

    def arguments(self, cache: Path, python: Callable[[str], Path]) -> list[str | Path]:
        """The command line, with a folder for compiled programs."""
        script, *rest = (part.replace(CACHE, str(cache)) for part in self.command)
        return [python(self.environment), HERE / "peers" / script, *rest]


TUNED, F32, BF16 = "jaxlm-tuned", "float32", "bfloat16"
PEERS = {
    "jaxlm": Peer("jaxlm", ("jaxlm_run.py", "1", CACHE, F32)),
    "jaxlm-2": Peer("jaxlm", ("jaxlm_run.py", "2", CACHE, F32)),
    TUNED: Peer("jaxlm", ("jaxlm_run.py", "1", CACHE, F32, "tuned")),
    "jaxlm-bf16": Peer("jaxlm", ("jaxlm_run.py", "1", CACHE, BF16)),
    **{
        f"bare-{form}-{micro}": Peer("jaxlm", ("bare_jax.py", form, micro, CACHE))
        for form in ("scan", "unroll")
        for micro in ("1", "2")
    },
    "torch-eager": Peer("torch", ("torch_gpt2.py", "eager", F32)),
    "torch-compile": Peer("torch", ("torch_gpt2.py", "compile", F32)),
    "torch-eager-bf16": Peer("torch", ("torch_gpt2.py", "eager", BF16)),
    "torch-compile-bf16": Peer("torch", ("torch_gpt2.py", "compile", BF16)),
    "hf-trainer": Peer("hf", ("hf_trainer.py",)),
    "levanter": Peer("levanter", ("levanter_run.py", CACHE)),
}
"""By name; -1 and -2 are numbers of microbatches."""
DEFAULT = ("jaxlm", "bare-unroll-2", "torch-eager", "torch-compile")


def main() -> None:
    """Runs the peers in turn and reports."""
    options = parse_arguments()
    names = chosen(options)
    if not options.here:
        for environment in dict.fromkeys([*(PEERS[name].environment for name in names), "torch"]):
            prepare(environment)
    # Installing compiles bytecode for the other peers. An editable installation leaves it to the first import.
    compileall.compile_dir(ROOT / "src", quiet=1)
    python = lambda environment: (  # noqa: E731
        Path(sys.executable) if options.here else HERE / ".venvs" / environment / "bin" / "python"
    )
    print(this_processor(), file=sys.stderr)
    began = time.monotonic()
    with ExitStack() as closing:
        try:
            live = Live(PEERS, python, options.memory_gib * 2**30, closing)
            dtypes = {F32, *(BF16 for name in names if BF16 in PEERS[name].command)}
            peaks = [live.peak(dtypes)]
            started = {name: live.start(name) for name in names}
            turns = live.rounds(names, options.rounds, options.steps, end=began + 60 * options.minutes)
            peaks.append(live.peak(dtypes))
            live.close()
            starts = {name: [live.cold_and_warm(name) for _ in range(options.starts)] for name in names}
        except PeerFailedError as error:
            raise SystemExit(str(error)) from error
    if options.output is not None:
        options.output.write_text(json.dumps([vars(turn) for turn in turns], indent=1))
    print(json.dumps(report(this_processor(), started, turns, peaks, starts)))


def parse_arguments() -> argparse.Namespace:
    """The command line. Wrong numbers end the process with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers",
        default=",".join(DEFAULT),
        help=f"comma-separated names, or all; the others are compared with the first. Known: {', '.join(PEERS)}",
    )
    parser.add_argument("--tuned", action="store_true", help=f"also {TUNED}: with what `jaxlm bench --tune` kept")
    parser.add_argument("--rounds", type=int, default=40, help="at most this many rounds (default 40)")
    parser.add_argument("--minutes", type=float, default=11, help="no round starts after this time (default 11)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a turn, after one more (default 4)")
    parser.add_argument(
        "--starts", type=int, default=0, help="pairs of starts per peer to time, without and with cache"
    )
    parser.add_argument("--memory_gib", type=float, default=24, help="most memory of all peers together (default 24)")
    parser.add_argument("--here", action="store_true", help="run all peers with this Python and its packages")
    parser.add_argument("--output", type=Path, help="write every turn's figures to this file, as JSON")
    options = parser.parse_args()
    for name, least in {"rounds": 2, "minutes": 0, "steps": 1, "starts": 0, "memory_gib": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name}: {getattr(options, name)} given, at least {least} expected")
    names = [*PEERS] if options.peers == "all" else options.peers.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--peers: {', '.join(unknown)} given. Known: all, {', '.join(PEERS)}")
    if len({*names}) < len(names):
        parser.error(f"--peers: {options.peers} names a peer twice")
    return options


def chosen(options: argparse.Namespace) -> list[str]:
    """The peers to run. The tuned one needs what was tuned, so it is only run on request."""
    names = [name for name in PEERS if name != TUNED] if options.peers == "all" else options.peers.split(",")
    return [*names, TUNED] if options.tuned and TUNED not in names else names


def prepare(environment: str) -> None:
    """Makes a peer's environment unless it exists."""
    folder = HERE / ".venvs" / environment
    if (folder / "ready").exists():
        return
    print(f"installing the environment of {environment} ...", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *ENVIRONMENTS[environment]], check=True)
    (folder / "ready").touch()


class Live:
    """The processes of all peers, and one that multiplies matrices. One runs at a time; the others wait."""

    def __init__(self, peers: Mapping[str, Peer], python: Callable[[str], Path], memory: float, closing: ExitStack):
        """Args: python: the interpreter of an environment. memory: most bytes that all of them may use together."""
        self._peers, self._python, self._memory = peers, python, memory
        self._processes: dict[str, AnsweringProcess] = {}
        self._caches = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        closing.callback(self.close)
        self._products = AnsweringProcess([python("torch"), HERE / "peers" / "products.py"])
        closing.callback(self._products.end)
        self._products.answer(timeout_s=_START_S)

    def start(self, name: str) -> Started:
        """Starts a peer and waits for its first step."""
        process = self._processes[name] = self._launch(name, self._caches / name)
        answer = self._checked(name, lambda: process.answer(timeout_s=_START_S))
        used = {name: resident_bytes(process.pid) for name, process in self._processes.items()}
        if sum(used.values()) > self._memory:
            sizes = ", ".join(f"{name} {num_bytes / 2**30:.1f} GiB" for name, num_bytes in used.items())
            raise SystemExit(
                f"--memory_gib: {self._memory / 2**30:g} given, but the peers need more together: {sizes}. Run fewer of them"
            )
        print(f"{name}: first step after {answer['first_step_s']:.1f} s", file=sys.stderr)
        return Started(**answer)

    def rounds(self, names: Sequence[str], most: int, steps: int, *, end: float) -> list[Turn]:
        """Gives each peer a turn per round, until there are enough rounds, or the time is over after the second.

        Args:
            most: number of rounds.
            steps: measured steps of a turn.
        """
        turns: list[Turn] = []
        order = random.Random(0)
        for number in range(most):
            if number > 1 and time.monotonic() > end:
                break
            of_round = [self._turn(name, number, steps) for name in order.sample(names, len(names))]
            turns += of_round
            medians = ", ".join(f"{turn.peer} {turn.step_s * 1e3:.0f} ms" for turn in of_round)
            print(f"round {number + 1}: {medians}", file=sys.stderr)
        return turns

    def _turn(self, name: str, number: int, steps: int) -> Turn:
        process = self._processes[name]
        before, ticks, own = self._calibrated(), CpuTicks.now(), ticks_of(process.pid)
        answer = self._checked(name, lambda: process.ask(str(steps + 1), timeout_s=_TURN_S))
        use = Use.between(ticks, CpuTicks.now(), ticks_of(process.pid) - own)
        time.sleep(_SETTLE_S)
        return Turn(name, number, **answer, **vars(use), flops_before=before, flops_after=self._calibrated())

    def _calibrated(self) -> float:
        return self._products.ask("calibrate", timeout_s=_TURN_S)["flops"]

    def peak(self, dtypes: Collection[str] = (F32,)) -> dict[str, float]:
        """FLOP/s of a large product in each of the dtypes, by library."""
        return self._products.ask(f"peak {' '.join(dtypes)}", timeout_s=_TURN_S)["flops"]

    def cold_and_warm(self, name: str) -> tuple[float, float]:
        """Seconds from the start of a process to the end of its first step, without and with cached programs."""
        seconds = []
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(2):
                process = self._launch(name, Path(cache))
                try:
                    answer = self._checked(name, lambda process=process: process.answer(timeout_s=_START_S))
                    seconds.append(answer["first_step_s"])
                finally:
                    process.end()
        return seconds[0], seconds[1]

    def close(self) -> None:
        """Ends the peers."""
        while self._processes:
            self._processes.popitem()[1].end()

    def _launch(self, name: str, cache: Path) -> AnsweringProcess:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        return AnsweringProcess(self._peers[name].arguments(cache, self._python), cwd=ROOT, environment=environment)

    @staticmethod
    def _checked(name: str, answer: Callable[[], dict]) -> dict:
        try:
            return answer()
        except PeerFailedError as error:
            raise PeerFailedError(f"{name} failed: {error}") from error


if __name__ == "__main__":
    main()
