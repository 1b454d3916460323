"""jaxlm's compiled step as in `python -m jaxlm.train`. Arguments: microbatches, compilation cache, [tuned]."""

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from jaxlm.core.imports import gc_paused

import common
import jax
import jax.numpy as jnp
import numpy as np

with gc_paused():
    from jaxlm.bench import random_batch
    from jaxlm.config.load import read_config
    from jaxlm.core import tree
    from jaxlm.engine.phases import enter_phase
    from jaxlm.engine.sync import FlagSync, SyncFlags
    from jaxlm.run.compilation.cache import enable_compilation_cache
    from jaxlm.run.compilation.options import step_options, tuned_options
    from jaxlm.run.compilation.step import compile_step
    from jaxlm.run.plan import make_plan

CONFIG = Path(__file__).with_name("gpt2.yaml")
TUNE = f"jaxlm bench --config_path {CONFIG.relative_to(Path(__file__).parents[2])} --tune --steps 40"


def config(micro: int, folder: str, options_from: str | None):
    """The benchmark's configuration, with the options that were tuned in a folder."""
    run = read_config(CONFIG)
    changed = {
        "log_dir": folder,
        "compilation_cache_dir": options_from,
        "per_device_parallelism": common.BATCH // micro,
    }
    return replace(run, trainer=replace(run.trainer, **changed))


def loaded(model, given):
    """The model with the initial weights of all peers."""
    names = {"attn.q_proj": "q", "attn.k_proj": "k", "attn.v_proj": "v", "attn.o_proj": "o"}
    names |= {"mlp.up_proj": "up", "mlp.down_proj": "down"}
    arrays = {}
    for path, leaf in tree.leaves(model):
        array = tree.raw(leaf)
        if path in ("tokens.weight", "positions.weight"):
            array = given[path.removesuffix(".weight")]
        for ours, theirs in names.items():
            if path.endswith(f"{ours}.weight"):
                stacked = np.stack([given[f"{i}.{theirs}"].T for i in range(common.LAYERS)])
                array = stacked.reshape(array.shape)
        arrays[path] = jax.device_put(array, tree.raw(leaf).sharding)
    return tree.replace_leaves(model, arrays)


def main():
    micro, cache, *tuned = sys.argv[1:]
    enable_compilation_cache(cache)
    with tempfile.TemporaryDirectory() as folder:
        options_from = str(read_config(CONFIG).trainer.compilation_cache_dir) if tuned else None
        plan = make_plan(config(int(micro), folder, options_from), "peer", common.VOCAB)
        if tuned and tuned_options(plan) is None:
            raise SystemExit(f"nothing was tuned for this step in {options_from} on this machine. Tune it: {TUNE}")
        clock = common.Clock(version=jax.__version__, options=", ".join(filter(None, step_options(plan).texts)))
        with plan.layout.use():
            phase = plan.phases[0]
            enter = enter_phase(plan.state_builder, phase, plan.layout, None)
            step = compile_step(plan, phase, lambda _: None).call
            state = enter()
            state = type(state)(**{**vars(state), "model": loaded(state.model, common.weights())})
            flags = FlagSync(plan.layout).to_devices(SyncFlags())
            like = random_batch(plan, 0)
            for number in itertools.count():
                state, report = step(state, {}, given_batch(like, number), flags)
                if not clock.tick(report.metrics["train/loss"]):
                    break


def given_batch(like, number):
    """The rows of a step as a training batch."""
    inputs, targets = (jnp.asarray(a).reshape(like.tokens.array.shape) for a in common.batch(number))
    column = lambda array: type(like.tokens)(array, like.tokens.axes)  # noqa: E731
    return type(like)(column(inputs), column(targets), like.loss_mask, like.segment_ids, like.positions)


main()
