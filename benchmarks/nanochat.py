"""Compares jaxlm with nanochat itself on a CPU: whether both compute the same, and how fast.

    git clone https://github.com/karpathy/nanochat
    python benchmarks/nanochat.py --nanochat nanochat --parity
    python benchmarks/nanochat.py --nanochat nanochat --parity --bundle eval_bundle --output parity.json
    python benchmarks/nanochat.py --nanochat nanochat --speed

Needs jaxlm with the extras `torch` and `bench`, and a checkout of the revision of February or of July 2026 (commit 92d63d4).
Give several for several recipes. Nothing is downloaded.

--parity   For each depth, nanochat's scripts/base_train.py takes 20 steps, and so does `jaxlm train`: from the same weights
           (nanochat's initial ones with noise, so that its zeros matter too), on the same shards, with the same tokenizer.
           Each side derives its rates and packs its rows by itself. Compares logits, losses, bits per byte and the answers
           to CORE, with models that go in both directions; and the rows of both loaders, from files with other row groups
           and with few documents. Ends with 1 if a goal is missed.
--speed    tokens/s of a step of nanochat's model at depth 4, with and without torch.compile, and of `jaxlm train`, by turns
           as in cpu_peers.py: same weights, rows and rates, float32, 8 rows of 512 tokens, a vocabulary of 32,768.

The last line printed is JSON.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cpu_peers import Live, Peer
from machine import this_processor
from nanochat_parity import (
    LOADER_SETS,
    Case,
    Finding,
    Place,
    Sizes,
    compare,
    compare_loaders,
    in_words,
    make_place,
)
from peer_report import report
from processes import PeerFailedError

from jaxlm.plan.load_config import read_config
from jaxlm.systems.nanochat.model import NanoConfig
from jaxlm.systems.nanochat.rates import RECIPES, REFERENCE_BATCH

_FILES = ("nanochat/gpt.py", "nanochat/optim.py", "nanochat/checkpoint_manager.py", "scripts/base_train.py")
_REVISIONS = {
    ("32", False): "seed",
    ("12", True): "head",
}  # inputs of value embeddings' gates, and whether it has smear
_DEPTH, _ROWS, _SEQ_LEN, _VOCAB = 4, 8, 512, 32_768
_COMPILED, _EAGER, _OURS = "nanochat-compile", "nanochat-eager", "jaxlm"


@dataclass(frozen=True)
class Checkout:
    """A folder with nanochat's code.

    Attributes:
        recipe: the recipe of the depth dial that it has.
        commit: as git abbreviates it; empty for a folder without git.
    """

    folder: Path
    recipe: str
    commit: str

    def __str__(self) -> str:
        return f"{self.recipe} ({self.commit or self.folder.name})"


def main() -> int:
    """Runs the comparisons and returns the exit code."""
    options = parse_arguments()
    checkouts = [read_checkout(given) for given in options.nanochat]
    print(this_processor(), file=sys.stderr)
    answer: dict[str, Any] = {"processor": str(this_processor()), "checkouts": list(map(str, checkouts))}
    findings: list[Finding] = []
    try:
        if options.parity:
            findings = parity(checkouts, options)
            answer["parity"] = [vars(finding) for finding in findings]
        if options.speed:
            answer["speed"] = speed(checkouts[0], options)
    except PeerFailedError as error:
        raise SystemExit(str(error)) from error
    if options.output is not None:
        options.output.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer))
    return int(any(finding.is_missed for finding in findings))


def parse_arguments() -> argparse.Namespace:
    """The command line. Wrong values end the process with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", nargs="+", required=True, metavar="FOLDER", help="checkouts of nanochat")
    parser.add_argument("--parity", action="store_true", help="compare numbers")
    parser.add_argument("--speed", action="store_true", help="compare speed with the first checkout")
    parser.add_argument("--depths", default="3,4", help="with --parity: comma-separated depths (default 3,4)")
    parser.add_argument(
        "--bundle", type=Path, help="with --parity: the folder of CORE's tasks, or one with some of their .jsonl files"
    )
    parser.add_argument("--seq_len", type=int, default=256, help="with --parity: tokens of a row (default 256)")
    parser.add_argument("--aspect_ratio", type=int, help="with --parity: width per layer (default 64)")
    parser.add_argument("--head_dim", type=int, help="with --parity: (default 128, or 64 below depth 4)")
    parser.add_argument("--window_pattern", help="with --parity: as in SSSL, nanochat's default")
    parser.add_argument("--row_group", type=int, default=1024, help="with --parity: documents of one (default 1024)")
    parser.add_argument("--documents", type=int, default=3072, help="with --parity: to train on (default 3072)")
    parser.add_argument("--questions", type=int, default=20, help="questions of each task of CORE (default 20)")
    parser.add_argument("--rounds", type=int, default=20, help="with --speed: at most this many rounds (default 20)")
    parser.add_argument("--minutes", type=float, default=10, help="no round starts after this time (default 10)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn, after one more (default 3)")
    parser.add_argument("--memory_gib", type=float, default=24, help="most memory of all peers together (default 24)")
    parser.add_argument("--output", type=Path, help="write all figures to this file, as JSON")
    options = parser.parse_args()
    if not options.parity and not options.speed:
        parser.error("nothing to do. Give --parity, --speed, or both")
    limits = {"questions": 11, "rounds": 2, "minutes": 0, "steps": 1, "memory_gib": 1}
    limits |= {"seq_len": 16, "row_group": 1, "documents": 100}
    for name, least in limits.items():
        if getattr(options, name) < least:
            parser.error(f"--{name}: {getattr(options, name):g} given, at least {least} expected")
    depths = options.depths.split(",")
    if not all(depth.isdigit() and 2 <= int(depth) <= 32 for depth in depths):
        parser.error(f"--depths: {options.depths} given, numbers from 2 to 32 expected, as in 3,4")
    options.depths = [int(depth) for depth in dict.fromkeys(depths)]
    if options.bundle is not None and not options.bundle.is_dir():
        parser.error(f"--bundle: {options.bundle} given, which is no folder. jaxlm prepare --core_bundle downloads one")
    for name in ("torch", "psutil"):
        if importlib.util.find_spec(name) is None:
            parser.error(f"{name} is not installed. Run pip install 'jaxlm[torch,bench]'")
    return options


def read_checkout(given: str) -> Checkout:
    """Ends the process with a message if the folder has no nanochat, or another revision."""
    folder = Path(given).expanduser().resolve()
    if missing := [name for name in _FILES if not (folder / name).is_file()]:
        raise SystemExit(
            f"--nanochat: {given} given, but it has no {missing[0]}. Give the folder of a checkout, made with git clone"
            " https://github.com/karpathy/nanochat"
        )
    text = (folder / _FILES[0]).read_text(encoding="utf-8")
    channels = re.search(r"ve_gate_channels = (\d+)", text)
    recipe = _REVISIONS.get(("" if channels is None else channels[1], "smear_gate" in text))
    if recipe is None:
        raise SystemExit(
            f"--nanochat: {given} given, but its model is neither that of February 2026 (gates of value embeddings with 32"
            " inputs, no smear) nor that of July 2026 (12 inputs, smear). Run git checkout 92d63d4 there"
        )
    commit = ""
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return Checkout(folder, recipe, commit)


def parity(checkouts: list[Checkout], options: argparse.Namespace) -> list[Finding]:
    """Compares the numbers of all checkouts at all depths."""
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder:
        place: Place = make_place(Path(folder), options.bundle, options.questions, options.row_group, options.documents)
        sizes = Sizes(options.seq_len, options.aspect_ratio, options.head_dim, options.window_pattern)
        for checkout in checkouts:
            findings += compare_loaders(str(checkout), checkout.folder, place)
            print(f"\n{checkout}, loaders\n" + "\n".join(map(in_words, findings[-len(LOADER_SETS) :])), flush=True)
            for depth in options.depths:
                # The early revision orthogonalizes in bfloat16 everywhere, the late one only where it computes in bfloat16.
                for in_bfloat16 in (True, False) if checkout.recipe == "seed" else (False,):
                    case = Case(str(checkout), checkout.folder, checkout.recipe, depth, in_bfloat16, sizes)
                    began = time.monotonic()
                    of_case = compare(case, place)
                    print(f"\n{case}, {time.monotonic() - began:.0f} s")
                    print("\n".join(map(in_words, of_case)), flush=True)
                    findings += of_case
    return findings


def speed(checkout: Checkout, options: argparse.Namespace) -> dict[str, Any]:
    """Measures nanochat's step and jaxlm's by turns."""
    began = time.monotonic()
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        live = Live(speed_peers(checkout, folder), lambda _: Path(sys.executable), options.memory_gib * 2**30, closing)
        peaks = [live.peak()]
        found = {name: live.start(name) for name in (_EAGER, _OURS, _COMPILED)}  # the first writes the initial weights
        started = {name: found[name] for name in (_OURS, _EAGER, _COMPILED)}
        turns = live.rounds([*started], options.rounds, options.steps, end=began + 60 * options.minutes)
        peaks.append(live.peak())
    print(f"\n{checkout}, depth {_DEPTH}, {_ROWS} rows of {_SEQ_LEN} tokens, float32")
    return report(this_processor(), started, turns, peaks, {})


def speed_peers(checkout: Checkout, folder: Path) -> dict[str, Peer]:
    """The peers, whose options are written into a folder."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(speed_configuration(checkout.recipe)))
    run, recipe = read_config(config), RECIPES[checkout.recipe]
    model, optimizer, scale = run.model, run.optimizer, (_ROWS * _SEQ_LEN / REFERENCE_BATCH) ** 0.5
    assert isinstance(model, NanoConfig)
    flops = model.flops_per_token(_VOCAB).causal
    common = {
        "shape": [_ROWS, _SEQ_LEN, _VOCAB],
        "facts": {"tokens_per_step": _ROWS * _SEQ_LEN, "flops_per_token": flops},
    }
    start, momentum = folder / "start", recipe.optimizer["momentum_schedule"]
    heads = dict.fromkeys(("n_head", "n_kv_head"), model.num_heads)
    sizes = {"sequence_len": _SEQ_LEN, "vocab_size": _VOCAB, "n_layer": _DEPTH, "n_embd": model.hidden_dim, **heads}
    rates = {
        "unembedding_lr": recipe.unembedding_lr * scale,
        "embedding_lr": recipe.embedding_lr * scale,
        "scalar_lr": recipe.scalar_lr * scale,
        "matrix_lr": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
    }
    theirs = {
        "checkout": str(checkout.folder),
        "base_dir": str(folder / "base"),
        "sizes": {**sizes, "window_pattern": model.window_pattern},
        "rates": rates,
        "momentum": [momentum["initial"], recipe.optimizer["momentum"], momentum["warmup"]],
    }
    files = {
        _OURS: ("nanochat_jaxlm.py", {"config": str(config), "start": str(start), "cache": str(folder / "programs")}),
        _EAGER: ("nanochat_torch.py", {**theirs, "compiles": False, "start": str(start)}),
        _COMPILED: ("nanochat_torch.py", {**theirs, "compiles": True, "start": None}),
    }
    peers = {}
    for name, (script, own) in files.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**common, **own}))
        peers[name] = Peer(name, (script, "step", str(file)))
    return peers


def speed_configuration(recipe: str) -> dict[str, Any]:
    """jaxlm's configuration. Windows are full, as nanochat recommends without Flash Attention 3."""
    late = recipe == "head"
    return {
        "preset": {
            "type": "depth_dial",
            "depth": _DEPTH,
            "recipe": recipe,
            "total_batch_size": _ROWS * _SEQ_LEN,
            "num_iterations": 1_000_000,
            "device_batch_size": _ROWS,
        },
        "data": {"vocab_size": _VOCAB},
        "model": {"seq_len": _SEQ_LEN, "window_pattern": "L", **({"rope_dtype": "float32"} if late else {})},
        "optimizer": {"warmup": 0, **({"orthogonalization_dtype": "float32"} if late else {})},
        "trainer": {"compilation_cache_dir": None},
    }


if __name__ == "__main__":
    sys.exit(main())
