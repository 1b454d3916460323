"""jaxlm's part of trl_peers.py. Arguments: what to do, the folder of the model, a folder for compiled programs.

make         writes the model with random weights, in Hugging Face format; prints the number of its parameters as JSON
memory       prints the bytes that the compiled step of each method needs, as JSON
sft, ...     times the compiled step of `jaxlm train` with that method
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path

from jaxlm.core.imports import gc_paused

import common
import jax
import numpy as np
import post_training_rows as work

with gc_paused():
    from jaxlm.config.load import decode_run
    from jaxlm.config.yaml import ConfigSource
    from jaxlm.data.loader import leading_axes
    from jaxlm.engine.phases import enter_phase
    from jaxlm.engine.sync import FlagSync, SyncFlags
    from jaxlm.interop.hf.folder import save_folder
    from jaxlm.interop.pretrained import load_pretrained
    from jaxlm.run.compilation.cache import enable_compilation_cache
    from jaxlm.run.compilation.options import step_options
    from jaxlm.run.compilation.step import compile_step
    from jaxlm.run.plan import make_plan


def planned(method: str, log_dir: str):
    """The plan of a run with a method."""
    num_examples = work.SEQUENCES // 2 if work.is_dpo(method) else work.SEQUENCES
    phase = {"name": "tune"}
    if work.is_lora(method):
        surgery = [{"type": "lora", "target": "attn|mlp", "rank": work.RANK, "alpha": work.ALPHA}]
        phase |= {"surgery": surgery, "trainable": [r"\.[ab]$"]}
    tree = {
        "model": {"type": "llama", **work.MODEL},
        "data": {"type": "pairs"} if work.is_dpo(method) else {},
        "objective": {"type": "dpo", "beta": work.BETA} if work.is_dpo(method) else {},
        "phases": [phase],
        "trainer": {
            "id": "peer",
            "log_dir": log_dir,
            "num_train_steps": common.MOST_STEPS,
            "train_batch_size": num_examples,
            "per_device_parallelism": num_examples,
        },
        "optimizer": {
            "learning_rate": work.LEARNING_RATE[method],
            "beta1": work.BETAS[0],
            "beta2": work.BETAS[1],
            "epsilon": work.EPSILON,
            "weight_decay": 0.0,
            "max_grad_norm": work.CLIP,
            "lr_schedule": "constant",
            "warmup": 0,
        },
    }
    return make_plan(decode_run(ConfigSource(tree), "peer"), "peer", work.VOCAB)


def columns(step: int, num_examples: int) -> dict[str, np.ndarray]:
    """The columns of a step's batch: [examples, (2,) 256]."""
    tokens = work.rows(step)
    shape = (num_examples, *(() if num_examples == len(tokens) else (2,)), work.MODEL["seq_len"])
    at = np.arange(work.MODEL["seq_len"], dtype=np.int32)
    found = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.broadcast_to(at >= work.PROMPT - 1, tokens[:, 1:].shape).astype(np.float32),
        "segment_ids": np.ones_like(tokens[:, 1:]),
        "positions": np.broadcast_to(at, tokens[:, 1:].shape),
    }
    return {name: column.reshape(shape) for name, column in found.items()}


def make(folder: Path) -> None:
    """Writes the model that all peers start from."""
    with tempfile.TemporaryDirectory() as logs:
        plan = planned("sft", logs)
    with plan.layout.use():
        model = jax.jit(plan.state_builder.initial_model)()
        save_folder(folder, model, plan.config.model, plan.layout, dtype=np.float32, files={}, special_ids={})
    print(json.dumps({"parameters": sum(leaf.size for leaf in jax.tree.leaves(model))}))


def memory() -> None:
    """Prints the bytes of each method's step."""
    found = {}
    for method in work.LEARNING_RATE:
        with tempfile.TemporaryDirectory() as logs:
            plan = planned(method, logs)
        with plan.layout.use():
            found[method] = compile_step(plan, plan.phases[0], lambda _: None).num_bytes
    print(json.dumps(found))


def train(method: str, folder: Path) -> None:
    """Takes steps as long as the clock says."""
    with tempfile.TemporaryDirectory() as logs:
        plan = planned(method, logs)
    phase, stage = plan.phases[0], plan.batches.train.largest
    options = ", ".join(filter(None, step_options(plan).texts))
    clock = common.Clock(version=jax.__version__, options=options, **work.facts(method))
    spec = plan.data[0].batch_spec(work.MODEL["seq_len"])
    with plan.layout.use():
        weights = load_pretrained(folder, plan.state_builder.abstract_initial_model, plan.config.model, plan.layout)
        enter = enter_phase(plan.state_builder, phase, plan.layout, None, weights)
        step = compile_step(plan, phase, lambda _: None).call
        state, flags = enter(), FlagSync(plan.layout).to_devices(SyncFlags())
        for number in itertools.count():
            of_step = columns(number, stage.size)
            batch = spec.assemble(
                lambda at, found=of_step: {name: column[at] for name, column in found.items()},
                leading_axes(stage),
                plan.layout,
            )
            state, report = step(state, {}, batch, flags)
            if not clock.tick(report.metrics["train/loss"]):
                break


def main() -> None:
    task, folder, cache = sys.argv[1:]
    enable_compilation_cache(cache)
    if task == "make":
        make(Path(folder))
    elif task == "memory":
        memory()
    else:
        train(task, Path(folder))


main()
