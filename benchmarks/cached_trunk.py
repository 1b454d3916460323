"""Measures what training on the stored output of a frozen trunk gains over computing it in every step.

    python benchmarks/cached_trunk.py [--trunks 2,4,8] [--layers 2] [--steps 96] [--hidden 256] [--store stored|int8]

A Llama on the standard library's source files whose newest layers (`--layers`) train on a frozen trunk, with the final norm
and the head. For each depth of the trunk, the same steps run twice in this process, on batches from the disk: four with a
trunk that is computed, four with one that is stored, and so on, in turns that swap their order, because other programs may
share the machine. The first turn does not count. Prints a Markdown table and a JSON line:

    tokens/s       the median over turns, and the range of the middle half
    ratio          the median of the ratios within a turn
    losses         the largest relative difference between the losses of a step
    fill           tokens/s of the trunk as it fills the store, without compiling
    pays after     epochs after which filling the store has been worth its time: the time to fill it, divided by what an
                   epoch saves
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from jaxlm.core.imports import gc_paused  # noqa: F401  # before haliax

import jax
import numpy as np

from jaxlm.data.annotations import AnnotationFolder
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.entry import enter_phase
from jaxlm.engine.sync import FlagSync
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.annotate import with_annotations
from jaxlm.session.compilation.step import compile_steps

BATCH, SEQ_LEN, VOCAB, TURN = 8, 128, 4096, 4
LEAST = 40  # steps that read more than one block of the store, of which the first is not timed


def config(options: argparse.Namespace, folder: Path, trunk: int, stored: bool) -> dict[str, Any]:
    model = {"type": "llama", "seq_len": SEQ_LEN, "hidden_dim": options.hidden, "num_layers": trunk}
    model |= {"intermediate_dim": 11 * options.hidden // 4, "num_heads": options.hidden // 64}
    model |= {"num_kv_heads": options.hidden // 64, "tie_word_embeddings": False}
    data = {"train_urls": ["stdlib:train"], "tokenizer": "bpe", "vocab_size": VOCAB, "cache_dir": str(folder / "data")}
    phase: dict[str, Any] = {"name": "upper", "trainable": ["new_stack", "final_norm", "^head"]}
    phase["surgery"] = [{"type": "grow", "num_layers": options.layers}]
    if stored:
        phase["objective"] = {"type": "cached_trunk", "int8": options.store == "int8"}
    trainer = {"train_batch_size": BATCH, "num_train_steps": options.steps, "log_dir": str(folder / "logs")}
    optimizer = {"learning_rate": 1e-3, "warmup": 10}
    return {"model": model, "data": data, "trainer": trainer, "optimizer": optimizer, "phases": [phase]}


class Side:
    """A run whose steps are taken a few at a time."""

    def __init__(self, options: argparse.Namespace, folder: Path, trunk: int, stored: bool):
        run = decode_run(ConfigSource(config(options, folder, trunk, stored)), None)
        tokenizer = run.data.corpus.load_tokenizer(print)
        self.plan = make_plan(run, "x", tokenizer.vocab_size)
        (self.phase,) = self.plan.phases
        order: dict[str, Any] = {"schedule": self.plan.batches.of(self.phase), "layout": self.plan.layout, "start": 0}
        order |= {"first_step": 0, "seed": self.plan.config.order_seed}
        with self.plan.layout.use():
            plain = self.plan.data[0].open(tokenizer, SEQ_LEN, lambda _: None)
            reopen = lambda: plain.batches(**order)  # noqa: E731
            clock, position, check_stop = ActivityClock(), {"examples": 0}, lambda: None
            where = self.plan, self.phase, plain, print, lambda step, text, *_, **fields: print(text), reopen
            self.data = with_annotations(*where, 0, position, clock, check_stop)
            self.steps = compile_steps(self.plan, self.phase, 0, print)
            self.state = enter_phase(self.plan.state_builder, self.phase, self.plan.layout, None)()
            self.batches = self.data.batches(**order)
            self.flags = FlagSync.unset(self.plan.layout)
        self.step, self.losses = 0, []

    def take(self, num_steps: int) -> float:
        """Takes steps, and returns their tokens/s."""
        started, losses = time.perf_counter(), []
        with self.plan.layout.use():
            for _ in range(num_steps):
                self.state, report = self.steps(self.state, {}, next(self.batches), self.flags)
                self.batches.read_ahead()
                losses.append(report.metrics["train/loss"])
            jax.block_until_ready(self.state)
        self.losses += [float(loss) for loss in losses]
        return num_steps * BATCH * SEQ_LEN / (time.perf_counter() - started)

    def fill(self) -> tuple[float, float]:
        """Fills the store. Returns its seconds, and the tokens/s after the first block, before which it is compiled."""
        ends, write = [], AnnotationFolder.write

        def timed(folder: AnnotationFolder, indices: np.ndarray, columns: Any) -> None:
            write(folder, indices, columns)
            ends.append((time.perf_counter(), len(indices)))

        started = time.perf_counter()
        with self.plan.layout.use(), mock.patch.object(AnnotationFolder, "write", timed):
            self.batches.refresh(self.state.model, 0)
        seconds = time.perf_counter() - started
        tokens = sum(count for _, count in ends[1:]) * SEQ_LEN
        return seconds, tokens / (ends[-1][0] - ends[0][0])


def compare(options: argparse.Namespace, folder: Path, trunk: int) -> dict[str, Any]:
    computed, stored = Side(options, folder, trunk, False), Side(options, folder, trunk, True)
    seconds, fill = stored.fill()
    speeds: list[tuple[float, float]] = []
    for turn in range(options.steps // TURN):
        sides = (computed, stored) if turn % 2 == 0 else (stored, computed)
        taken = {id(side): side.take(TURN) for side in sides}
        speeds.append((taken[id(computed)], taken[id(stored)]))
    for side in (computed, stored):
        side.batches.close()
    columns = list(zip(*speeds[1:], strict=True))
    ratios = [stored / computed for computed, stored in speeds[1:]]
    medians = [statistics.median(column) for column in columns]
    saved = 1 / medians[0] - 1 / medians[1]  # seconds a token
    return {
        "trunk": trunk,
        "computed": [medians[0], *_middle(columns[0])],
        "stored": [medians[1], *_middle(columns[1])],
        "ratio": [statistics.median(ratios), *_middle(ratios)],
        "losses": float(np.max(np.abs(np.subtract(computed.losses, stored.losses)) / np.array(computed.losses))),
        "fill_s": seconds,
        "fill": fill,
        "epochs": 1 / fill / saved if saved > 0 else None,
    }


def _middle(values: Any) -> tuple[float, float]:
    quarters = statistics.quantiles(values, n=4)
    return quarters[0], quarters[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trunks", default="2,4,8", help="layers of the trunk, separated by commas")
    parser.add_argument("--layers", type=int, default=2, help="layers that train")
    parser.add_argument("--steps", type=int, default=96, help="a multiple of 4 and at least 40; 8 sequences each")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model, a multiple of 64")
    parser.add_argument("--store", choices=("stored", "int8"), default="stored")
    parser.add_argument("--folder", type=Path, help="keeps tokens and stores; by default, none are kept")
    options = parser.parse_args()
    if options.steps % TURN or options.steps < LEAST:
        parser.error(f"--steps: {options.steps} given, a multiple of {TURN} and at least {LEAST} expected")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found = [compare(options, folder, trunk) for trunk in map(int, options.trunks.split(","))]
    steps = f"{options.steps} steps of {BATCH} x {SEQ_LEN} tokens"
    shape = f"width {options.hidden}, {options.layers} layers train, {steps}"
    print(f"\n{shape}, {options.store}, jax {jax.__version__} on {jax.devices()[0].device_kind}\n")
    print("| trunk | computed, tokens/s | stored, tokens/s | ratio | losses | fill, tokens/s | pays after |")
    print("|---|---|---|---|---|---|---|")
    speed = lambda numbers: f"{numbers[0]:,.0f} ({numbers[1]:,.0f} to {numbers[2]:,.0f})"  # noqa: E731
    for one in found:
        ratio = f"{one['ratio'][0]:.2f} ({one['ratio'][1]:.2f} to {one['ratio'][2]:.2f})"
        epochs = "never" if one["epochs"] is None else f"{one['epochs']:.2f} epochs"
        print(
            f"| {one['trunk']} layers | {speed(one['computed'])} | {speed(one['stored'])} | {ratio} | {one['losses']:.0e}"
            f" | {one['fill']:,.0f} | {epochs} |"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
