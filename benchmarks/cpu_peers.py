"""Compares jaxlm with its peers on a CPU: same model, data and batch; each peer has its own processes and environment.

    python benchmarks/cpu_peers.py --rounds 5 --steps 20

Makes a virtual environment for each kind of peer once (under benchmarks/.venvs). Then runs the peers in turn, round
after round, so that other load on the machine affects all of them alike. Reports medians with the first and third
quartile of tokens/s, the time from the start of the process to the end of its first step with an empty and with a
filled compilation cache, peak memory, and the difference of the losses from those of the first peer. The last line
printed is JSON.
"""

import argparse
import compileall
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path

from processes import PeerFailedError, answer_of, spread

HERE = Path(__file__).parent
ROOT = HERE.parent
CACHE = "{cache}"  # in a command: a folder for compiled programs, for peers that can cache them

TORCH = ["torch==2.13.0", "numpy", "psutil"]
ENVIRONMENTS = {
    "jaxlm": ["-e", str(ROOT), "psutil"],
    "torch": TORCH,
    "hf": [*TORCH, "transformers>=5.20", "accelerate>=1.1"],
    # levanter imports gitpython and chex but does not require them.
    "levanter": ["levanter==1.2.dev1644", "gitpython", "chex", "psutil"],
}


@dataclass(frozen=True)
class Peer:
    """One way to train the model."""

    name: str
    environment: str
    command: tuple[str, ...]

    def run(self, steps: int, cache: Path) -> dict:
        """Runs one process and returns its JSON answer."""
        python = HERE / ".venvs" / self.environment / "bin" / "python"
        script, *rest = (part.replace(CACHE, str(cache)) for part in self.command)
        command = [str(python), str(HERE / "peers" / script), str(steps), *rest]
        try:
            return answer_of(command)
        except PeerFailedError as error:
            raise SystemExit(f"{self.name} failed:\n{error}") from error


PEERS = (
    Peer("jaxlm", "jaxlm", ("jaxlm_run.py", "1", CACHE)),
    Peer("jaxlm, 2 microbatches", "jaxlm", ("jaxlm_run.py", "2", CACHE)),
    *(
        Peer(f"bare JAX, {form}, {micro} microbatch(es)", "jaxlm", ("bare_jax.py", form, micro, CACHE))
        for form in ("scan", "unroll")
        for micro in ("1", "2")
    ),
    Peer("torch eager", "torch", ("torch_gpt2.py", "eager")),
    Peer("torch.compile", "torch", ("torch_gpt2.py", "compile")),
    Peer("Hugging Face Trainer", "hf", ("hf_trainer.py",)),
    Peer("Levanter", "levanter", ("levanter_run.py", CACHE)),
)


@dataclass
class Record:
    """Results of a peer's processes."""

    rates: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add(self, cold: dict, warm: dict) -> None:
        """Adds the answers of a process with an empty cache and of the next one with a filled cache."""
        self.rates.append(warm["tokens_per_second"])
        self.cold.append(cold["first_step_s"])
        self.warm.append(warm["first_step_s"])
        self.peak_bytes.append(warm["peak_bytes"])
        self.losses = warm["losses"]


def main() -> None:
    """Runs every peer in every round and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes per peer (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per process (default 20)")
    parser.add_argument(
        "--only", default="", help="run only peers whose name contains one of these, separated by commas"
    )
    options = parser.parse_args()
    filters = options.only.lower().split(",")
    peers = [peer for peer in PEERS if any(part in peer.name.lower() for part in filters)]
    for name in dict.fromkeys(peer.environment for peer in peers):
        prepare(name)
    # Installing compiles bytecode for the other peers. An editable installation leaves it to the first import.
    compileall.compile_dir(ROOT / "src", quiet=1)
    records = {peer.name: Record() for peer in peers}
    for number in range(options.rounds):
        for peer in peers:
            with tempfile.TemporaryDirectory() as cache:
                records[peer.name].add(peer.run(2, Path(cache)), peer.run(options.steps, Path(cache)))
            print(f"round {number + 1}: {peer.name}: {records[peer.name].rates[-1]:,.0f} tokens/s", file=sys.stderr)
    report(records)


def prepare(name: str) -> None:
    """Makes a peer's environment unless it exists."""
    folder = HERE / ".venvs" / name
    if (folder / "ready").exists():
        return
    print(f"installing the environment of {name} ...", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name]], check=True)
    (folder / "ready").touch()


def report(records: dict[str, Record]) -> None:
    """Prints one line per peer, then everything as JSON."""
    reference = next(iter(records.values()))
    base = statistics.median(reference.rates)
    print(f"{'':32} {'tokens/s':>20} {'ratio':>6} {'first step':>11} {'cached':>7} {'memory':>8} {'loss differs':>12}")
    summary = {}
    for name, record in records.items():
        rate, low, high = spread(record.rates)
        pairs = zip(record.losses, reference.losses, strict=False)
        differs = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
        cold, warm = statistics.median(record.cold), statistics.median(record.warm)
        memory = statistics.median(record.peak_bytes)
        rates = f"{rate:,.0f} ({low:,.0f}-{high:,.0f})"
        print(
            f"{name:32} {rates:>20} {base / rate:6.2f} {cold:10.1f}s {warm:6.1f}s {memory / 2**20:5,.0f}MiB"
            f" {differs:12.1e}"
        )
        summary[name] = {
            "tokens_per_second": rate,
            "quartiles": [low, high],
            "first_step_s": cold,
            "first_step_cached_s": warm,
            "peak_bytes": memory,
            "loss_differs": differs,
        }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
