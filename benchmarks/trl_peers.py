"""Compares fine-tuning in jaxlm with TRL on a CPU: same weights, data and batch, in the same seconds.

    python benchmarks/trl_peers.py
    python benchmarks/trl_peers.py --methods sft,dpo,dpo-lora,grpo --minutes 10
    python benchmarks/trl_peers.py --methods dpo --variants trl,trl-compile

For each method, both programs stay alive, each in its own process, and take a few steps in turn, as in cpu_peers.py, whose
report this prints: tokens/s, how many times as fast jaxlm is with a 95 % interval, memory, and by how much the losses of both
differ. benchmarks/peers/post_training_rows.py says what is trained. Adapters begin with other random numbers in each program,
so the losses of `-lora` differ after the first step. `grpo` includes sampling and the reward. Each program has its own
sampler, so the entropies that are compared in place of losses differ by what chance adds.

Then it prints the memory that jaxlm's compiled steps need, and that of `dpo-lora` relative to `sft-lora` with as many
sequences. Makes a virtual environment for each program once (under benchmarks/.venvs), or uses this Python for both
(`--here`). The last line printed is JSON.
"""

import argparse
import compileall
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from cpu_peers import HERE, ROOT, Live, Peer, prepare
from machine import this_processor
from peer_report import report
from processes import PeerFailedError, answer_of

METHODS = ("sft", "sft-lora", "dpo", "dpo-lora", "grpo")
VARIANTS = {"trl": (), "trl-compile": ("compile",)}
GOAL, MEMORY_GOAL = 1.3, 1.1
_JAXLM, _TRL = "post_training_jaxlm.py", "post_training_trl.py"
_TIMEOUT_S = 900


def main() -> None:
    """Compares each method and reports."""
    options = parse_arguments()
    if not options.here:
        for environment in ("jaxlm", "torch", "trl"):
            prepare(environment)
    compileall.compile_dir(ROOT / "src", quiet=1)
    python = lambda environment: (  # noqa: E731
        Path(sys.executable) if options.here else HERE / ".venvs" / environment / "bin" / "python"
    )
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, cache = Path(scratch, "model"), Path(scratch, "cache")
        jaxlm = [python("jaxlm"), HERE / "peers" / _JAXLM]
        try:
            made = answer_of([*jaxlm, "make", model, cache], timeout_s=_TIMEOUT_S)
            print(f"model: {made['parameters']:,} parameters", file=sys.stderr)
            for method in options.methods:
                print(f"\n{method}")
                found[method] = compared(method, options, python, model)
            num_bytes = answer_of([*jaxlm, "memory", model, cache], timeout_s=_TIMEOUT_S)
        except PeerFailedError as error:
            raise SystemExit(str(error)) from error
    ratio = num_bytes["dpo-lora"] / num_bytes["sft-lora"]
    print("\nmemory of jaxlm's compiled step: " + ", ".join(f"{m} {b / 2**20:,.0f} MiB" for m, b in num_bytes.items()))
    print(f"dpo-lora needs {ratio:.3f} times the memory of sft-lora (goal: at most {MEMORY_GOAL})")
    for method, figures in found.items():
        for name, peer in figures["peers"].items():
            if peer["ahead_by"] is not None:
                low, mean, high = peer["ahead_by"]
                print(f"{method}: {mean:.3f} times as fast as {name} ({low:.3f} to {high:.3f}; goal {GOAL})")
    print(json.dumps({"methods": found, "step_bytes": num_bytes, "memory_ratio": ratio}))


def compared(method: str, options: argparse.Namespace, python, model: Path) -> dict:
    """The figures of one method."""
    peers = {"jaxlm": Peer("jaxlm", (_JAXLM, method, str(model), "{cache}"))}
    peers |= {name: Peer("trl", (_TRL, method, *VARIANTS[name], str(model))) for name in options.variants}
    began = time.monotonic()
    with ExitStack() as closing:
        live = Live(peers, python, options.memory_gib * 2**30, closing)
        peaks = [live.peak()]
        started = {name: live.start(name) for name in peers}
        turns = live.rounds(list(peers), options.rounds, options.steps, end=began + 60 * options.minutes)
        peaks.append(live.peak())
    return report(this_processor(), started, turns, peaks, {})


def parse_arguments() -> argparse.Namespace:
    """The command line. Wrong values end the process with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="sft,dpo,dpo-lora,grpo", help=f"comma-separated, of: {', '.join(METHODS)}")
    parser.add_argument("--variants", default="trl", help=f"comma-separated, of: {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=40, help="at most this many rounds for a method (default 40)")
    parser.add_argument("--minutes", type=float, default=6, help="no round of a method starts later (default 6)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a turn, after one more (default 4)")
    parser.add_argument("--memory_gib", type=float, default=24, help="most memory of all peers together (default 24)")
    parser.add_argument("--here", action="store_true", help="run both programs with this Python and its packages")
    options = parser.parse_args()
    for name, known in {"methods": METHODS, "variants": tuple(VARIANTS)}.items():
        given = getattr(options, name).split(",")
        if unknown := [each for each in given if each not in known]:
            parser.error(f"--{name}: {', '.join(unknown)} given. Known: {', '.join(known)}")
        setattr(options, name, list(dict.fromkeys(given)))
    for name, least in {"rounds": 2, "minutes": 0, "steps": 1, "memory_gib": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name}: {getattr(options, name)} given, at least {least} expected")
    return options


if __name__ == "__main__":
    main()
