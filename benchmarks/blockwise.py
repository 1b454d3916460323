"""Times one update of a block: all blocks in one step, against one block after the other.

    python benchmarks/blockwise.py [--layers 8] [--rounds 12]

The student has decoupled attention, transplanted from a random Llama (256 wide, 4 query and 2 key/value heads of 64, 8 rows
of 256 tokens, float32), and trains its queries and keys. `parallel` trains all blocks in a step. `sequential` trains one
block, given the teacher's streams or its own; its time is the mean over all blocks. `distill` is a step of the objective
of that name. Rounds are interleaved. Prints the median of each, the ratios with 95 % intervals of the rounds, and the memory
that the compiler plans for each step, as a Markdown table and as a JSON line.
"""

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

from jaxlm.core.imports import gc_paused  # noqa: F401  # before haliax

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from intervals import ratio_interval

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.precision import Precision
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.engine.phases import Phase
from jaxlm.engine.step import make_train_step
from jaxlm.engine.sync import FlagSync
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import vocab_axis
from jaxlm.objectives.distill import Distill
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.systems.upcycle.blockwise import Blockwise, Convergence
from jaxlm.systems.upcycle.decouple import DecoupleConfig

ROWS, VOCAB = 8, 4096
SURGERY = DecoupleConfig(sem_dim=64, geo_dim=64, method="random")
SEQUENTIAL: dict[str, Any] = {"order": "sequential", "convergence": Convergence(max_steps=10_000)}
OBJECTIVES = {
    "parallel": Blockwise(),
    "sequential, teacher's streams": Blockwise(**SEQUENTIAL),
    "sequential, own streams": Blockwise(**SEQUENTIAL, inputs="student"),
    "distill": Distill(weight=1.0),
}


class Timed:
    """A compiled step of an objective."""

    def __init__(self, objective: Any, config: LlamaConfig):
        sizes = {"embed": config.hidden_dim, "vocab": VOCAB, "layers": config.num_layers}
        shape = mesh_shape(1, replica=1, model=1)
        self.layout = make_layout(shape, AxisMappings("batch", ("embed",), (), {}, {}), sizes)
        single = jnp.dtype(jnp.float32)
        precision = Precision(single, single)
        self.num_blocks, self.objective = config.num_layers, objective
        phase = Phase(
            index=0,
            name="blocks",
            model=SURGERY.changed(config),
            surgeries=(SURGERY,),
            trainable=(r"attn\.[qk]_(sem|geo)",),
            objective=objective,
            optimizer=AdamConfig(learning_rate=1e-4),
            start=0,
            end=1000,
        )
        builder = StateBuilder(config, vocab_axis(VOCAB), 0, precision, (phase,))
        step = make_train_step(phase, self.layout, precision, builder.abstract_state(phase))
        with self.layout.use():
            self.state = enter_phase(builder, phase, self.layout, None)()
            self.refs = {"teacher": builder.initial_model()}
            self.batch, self.flags = _batch(config.seq_len), FlagSync.unset(self.layout)
            self.step = step.lower(self.state, self.refs, self.batch, self.flags).compile()
        memory = self.step.memory_analysis()
        assert memory is not None
        self.memory = memory.temp_size_in_bytes
        self.once(0)

    def once(self, block: int) -> float:
        """Seconds of a step in which a block is the first that is not done."""
        slots = self.state.slots
        if self.objective in (OBJECTIVES["distill"], OBJECTIVES["parallel"]):
            block = 0
        else:
            done = (jnp.arange(self.num_blocks) < block).astype(jnp.int32)
            slots = slots | {"objective": dataclasses.replace(slots["objective"], done=done)}
        state = jax.block_until_ready(dataclasses.replace(self.state, slots=slots))
        start = time.perf_counter()
        self.state, report = self.step(state, self.refs, self.batch, self.flags)
        jax.block_until_ready((self.state, report))
        return time.perf_counter() - start

    def round(self) -> float:
        """Mean seconds of a step over all blocks."""
        return statistics.fmean(self.once(block) for block in range(self.num_blocks))


def _batch(seq_len: int) -> TokenBatch:
    axes = (hax.Axis("microbatch", 1), hax.Axis("batch", ROWS), hax.Axis("position", seq_len))
    shape = tuple(axis.size for axis in axes)
    tokens = np.random.default_rng(0).integers(0, VOCAB, shape, np.int32)
    ones = np.ones(shape, np.int32)
    columns = (
        tokens,
        np.roll(tokens, -1, 2),
        ones.astype(np.float32),
        ones,
        np.broadcast_to(np.arange(seq_len), shape),
    )
    dtypes = (jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)
    return TokenBatch(*(hax.named(jnp.asarray(c, d), axes) for c, d in zip(columns, dtypes, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    sizes: dict[str, Any] = {
        "seq_len": 256,
        "hidden_dim": 256,
        "intermediate_dim": 704,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    config = LlamaConfig(**sizes, num_layers=options.layers)
    steps = {name: Timed(objective, config) for name, objective in OBJECTIVES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            seconds[name].append(step.round())
    # An update of a block takes a whole step in sequence, and its share of a step in parallel.
    blocks = {name: options.layers if name == "parallel" else 1 for name in steps}
    per_update = {name: [s / blocks[name] for s in times] for name, times in seconds.items()}
    print(f"{options.layers} layers, {options.rounds} rounds, jax {jax.__version__}\n")
    print("| step | ms, median (lowest to highest) | ms per update of a block | as a multiple of `parallel` | memory |")
    print("|---|---|---|---|---|")
    results = {}
    for name, times in seconds.items():
        low, mean, high = ratio_interval([a / b for a, b in zip(per_update[name], per_update["parallel"], strict=True)])
        ms = [1e3 * s for s in times]
        update = 1e3 * statistics.median(per_update[name])
        ratio = f"{mean:.2f} ({low:.2f} to {high:.2f})" if name.startswith("seq") else ""
        memory = steps[name].memory / 2**20
        print(
            f"| {name} | {statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f}) |"
            f" {'' if name == 'distill' else f'{update:.1f}'} | {ratio} | {memory:.0f} MiB |"
        )
        results[name] = {"ms": statistics.median(ms), "ratio": [low, mean, high], "mib": memory}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
