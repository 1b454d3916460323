"""jaxlm's compiled step as in `python -m jaxlm.train`. Arguments: steps, microbatches, [compilation cache]."""

import sys
import tempfile
from pathlib import Path

from jaxlm.core.imports import gc_paused

import common
import jax
import jax.numpy as jnp
import numpy as np

with gc_paused():
    from jaxlm.bench import random_batch
    from jaxlm.config.load import decode_run
    from jaxlm.config.yaml import ConfigSource
    from jaxlm.core import tree
    from jaxlm.engine.phases import enter_phase
    from jaxlm.engine.sync import FlagSync, SyncFlags
    from jaxlm.run.compilation.cache import enable_compilation_cache
    from jaxlm.run.compilation.step import compile_step
    from jaxlm.run.plan import make_plan


def config(micro: int, folder: str):
    return decode_run(
        ConfigSource(
            {
                "data": {"vocab_size": common.VOCAB},
                "model": {
                    "type": "gpt2",
                    "seq_len": common.SEQ_LEN,
                    "hidden_dim": common.HIDDEN,
                    "num_heads": common.HEADS,
                    "num_layers": common.LAYERS,
                },
                "trainer": {
                    "train_batch_size": common.BATCH,
                    "per_device_parallelism": common.BATCH // micro,
                    "num_train_steps": 1000,  # the same for all, so that cached programs can be reused
                    "log_dir": folder,
                },
                "optimizer": {
                    "learning_rate": common.LEARNING_RATE,
                    "beta1": common.BETAS[0],
                    "beta2": common.BETAS[1],
                    "epsilon": common.EPSILON,
                    "weight_decay": common.WEIGHT_DECAY,
                    "max_grad_norm": common.CLIP,
                    "lr_schedule": "constant",
                    "warmup": 0,
                },
            }
        ),
        "peer",
    )


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
    micro = int(sys.argv[2])
    clock = common.Clock(f"jaxlm, {micro} microbatch(es)", common.num_steps())
    if len(sys.argv) > 3:
        enable_compilation_cache(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(config(micro, folder), "peer", common.VOCAB)
        with plan.layout.use():
            phase = plan.phases[0]
            enter = enter_phase(plan.state_builder, phase, plan.layout, None)
            step = compile_step(plan, phase, lambda _: None).call
            state = enter()
            state = type(state)(**{**vars(state), "model": loaded(state.model, common.weights())})
            flags = FlagSync(plan.layout).to_devices(SyncFlags())
            like = random_batch(plan, 0)
            for number in range(clock.num_steps):
                state, report = step(state, {}, given_batch(like, number), flags)
                clock.tick(report.metrics["train/loss"])
    clock.answer(version=jax.__version__, folder=str(Path(folder).name))


def given_batch(like, number):
    """The rows of a step as a training batch."""
    inputs, targets = (jnp.asarray(a).reshape(like.tokens.array.shape) for a in common.batch(number))
    column = lambda array: type(like.tokens)(array, like.tokens.axes)  # noqa: E731
    return type(like)(column(inputs), column(targets), like.loss_mask, like.segment_ids, like.positions)


main()
