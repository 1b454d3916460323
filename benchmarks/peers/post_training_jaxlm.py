"""jaxlm's part of trl_peers.py. Arguments: what to do, the folder of the model, a folder for compiled programs.

make         writes the model with random weights, in Hugging Face format; prints the number of its parameters as JSON
memory       prints the bytes that the compiled step of each method needs, as JSON
sft, ...     times the compiled step of `jaxlm train` with that method; for `grpo`, with its sampling and its reward
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused

import common
import jax
import numpy as np
import post_training_rows as work

with gc_paused():
    from jaxlm.data.loader import RunServices, leading_axes
    from jaxlm.engine.entry import enter_phase
    from jaxlm.engine.sync import FlagSync
    from jaxlm.interop.hf.folder import save_folder
    from jaxlm.interop.pretrained import load_pretrained
    from jaxlm.plan.load_config import decode_run
    from jaxlm.plan.plan import make_plan
    from jaxlm.reading.yaml import ConfigSource
    from jaxlm.session.compilation.options import enable_compilation_cache, step_options
    from jaxlm.session.compilation.step import compile_step


def sections(method: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The sections `data` and `objective`, and the number of examples in a step. Args: folder: of the prompts of `grpo`."""
    if method == work.GRPO:
        data = {
            "type": "rollouts",
            "train_urls": [str(folder / "prompts.jsonl")],
            "cache_dir": str(folder / "cache"),
            "tokenizer": str(folder / "tokenizer"),
            "enforce_bos": False,
            "group_size": work.GROUP,
            "max_new_tokens": work.NEW_TOKENS,
            "rewards": [{"type": "function", "function": f"{work.__file__}:even_share"}],
        }
        objective = {"type": "grpo", "old_policy": "rollout", "kl": {"coef": work.KL_COEF}}
        return data, objective, work.SEQUENCES // work.GROUP
    if work.is_dpo(method):
        return {"type": "pairs"}, {"type": "dpo", "beta": work.BETA}, work.SEQUENCES // 2
    return {}, {}, work.SEQUENCES


def planned(method: str, folder: Path):
    """The plan of a run with a method."""
    data, objective, num_examples = sections(method, folder)
    phase = {"name": "tune"}
    if work.is_lora(method):
        surgery = [{"type": "lora", "target": "attn|mlp", "rank": work.RANK, "alpha": work.ALPHA}]
        phase |= {"surgery": surgery, "trainable": [r"\.[ab]$"]}
    tree = {
        "model": {"type": "llama", **work.MODEL},
        "data": data,
        "objective": objective,
        "phases": [phase],
        "trainer": {
            "id": "peer",
            "log_dir": str(folder / "logs"),
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


def fixed_batches(plan) -> Callable[[int, Any], Any]:
    """The batch of a step by its number."""
    stage, spec = plan.batches.train.largest, plan.data[0].batch_spec(work.MODEL["seq_len"])

    def batch(number: int, _model: Any) -> Any:
        of_step = columns(number, stage.size)
        read = lambda at: {name: column[at] for name, column in of_step.items()}  # noqa: E731
        return spec.assemble(read, leading_axes(stage), plan.layout)

    return batch


def sampled_batches(plan, folder: Path) -> Callable[[int, Any], Any]:
    """The batch of a step, which the model samples, made by what makes those of `jaxlm train`."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in work.prompts()))
    (folder / "tokenizer").mkdir()
    work.tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    data = plan.data[0]
    opened = data.open(data.corpus.load_tokenizer(print), work.MODEL["seq_len"], print)
    # No token has this id, so that no answer ends before the others.
    services = RunServices(stop_ids=(work.VOCAB,))
    batches = opened.batches(plan.batches.train, plan.layout, start=0, first_step=0, seed=0, services=services)

    def batch(number: int, model: Any) -> Any:
        if batches.due(number):
            batches.refresh(model, number)
        return next(batches)

    return batch


def make(folder: Path) -> None:
    """Writes the model that all peers start from."""
    with tempfile.TemporaryDirectory() as scratch:
        plan = planned("sft", Path(scratch))
    with plan.layout.use():
        model = jax.jit(plan.state_builder.initial_model)()
        save_folder(folder, model, plan.config.model, plan.layout, dtype=np.float32, files={}, special_ids={})
    print(json.dumps({"parameters": sum(leaf.size for leaf in jax.tree.leaves(model))}))


def memory() -> None:
    """Prints the bytes of each method's step."""
    found = {}
    for method in work.LEARNING_RATE:
        with tempfile.TemporaryDirectory() as scratch:
            plan = planned(method, Path(scratch))
        with plan.layout.use():
            found[method] = compile_step(plan, plan.phases[0], lambda _: None).num_bytes
    print(json.dumps(found))


def train(method: str, folder: Path, scratch: Path) -> None:
    """Takes steps as long as the clock says. Args: folder: of the model."""
    plan = planned(method, scratch)
    phase = plan.phases[0]
    options = ", ".join(filter(None, step_options(plan).texts))
    clock = common.Clock(version=jax.__version__, options=options, **work.facts(method))
    is_grpo = method == work.GRPO
    with plan.layout.use():
        weights = load_pretrained(folder, plan.state_builder.abstract_initial_model, plan.config.model, plan.layout)
        enter = enter_phase(plan.state_builder, phase, plan.layout, None, weights)
        step = compile_step(plan, phase, lambda _: None).call
        state, flags = enter(), FlagSync.unset(plan.layout)
        batch = sampled_batches(plan, scratch) if is_grpo else fixed_batches(plan)
        for number in itertools.count():
            state, report = step(state, {}, batch(number, state.model), flags)
            if not clock.tick(report.metrics["train/entropy" if is_grpo else "train/loss"]):
                break


def main() -> None:
    task, folder, cache = sys.argv[1:]
    enable_compilation_cache(cache)
    if task == "make":
        make(Path(folder))
    elif task == "memory":
        memory()
    else:
        with tempfile.TemporaryDirectory() as scratch:
            train(task, Path(folder), Path(scratch))


main()
