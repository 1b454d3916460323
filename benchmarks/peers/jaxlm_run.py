"""jaxlm's compiled step as in `python -m jaxlm.train`. Arguments: microbatches, compilation cache, dtype, [tuned]."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxlm.core.imports import gc_paused

import common
import jax
import numpy as np

with gc_paused():
    from jaxlm_steps import take_steps

    from jaxlm.core import tree
    from jaxlm.plan.load_config import read_config
    from jaxlm.plan.plan import make_plan
    from jaxlm.session.compilation.options import enable_compilation_cache, step_options, tuned_options

CONFIG = Path(__file__).with_name("gpt2.yaml")
TUNE = f"jaxlm bench --config_path {CONFIG.relative_to(Path(__file__).parents[2])} --tune --steps 40"


def config(micro: int, folder: str, dtype: str, options_from: str | None):
    """The benchmark's configuration, with a dtype for products and the options that were tuned in a folder."""
    run = read_config(CONFIG)
    changed = {
        "log_dir": folder,
        "compilation_cache_dir": options_from,
        "per_device_parallelism": common.BATCH // micro,
        "mp": {"float32": "f32", "bfloat16": "p=f32,c=bfloat16"}[dtype],
    }
    return replace(run, trainer=replace(run.trainer, **changed))


def loaded(model, given):
    """The model with the initial weights of all peers."""
    names = {"attn.q_proj": "q", "attn.k_proj": "k", "attn.v_proj": "v", "attn.o_proj": "o"}
    names |= {"mlp.up_proj": "up", "mlp.down_proj": "down"}
    arrays: dict[str, Any] = {}
    for path, leaf in tree.leaves(model):
        array = tree.raw(leaf)
        if path in ("tokens.weight", "positions.weight"):
            array = given[path.removesuffix(".weight")]
        for ours, theirs in names.items():
            if path.endswith(f"{ours}.weight"):
                stacked = np.stack([given[f"{i}.{theirs}"].T for i in range(common.LAYERS)])
                array = stacked.reshape(tree.raw(leaf).shape)
        arrays[path] = jax.device_put(array, tree.raw(leaf).sharding)
    return tree.replace_leaves(model, arrays)


def main():
    micro, cache, dtype, *tuned = sys.argv[1:]
    enable_compilation_cache(cache)
    with tempfile.TemporaryDirectory() as folder:
        options_from = str(read_config(CONFIG).trainer.compilation_cache_dir) if tuned else None
        plan = make_plan(config(int(micro), folder, dtype, options_from), "peer", common.VOCAB)
        if tuned and tuned_options(plan) is None:
            raise SystemExit(f"nothing was tuned for this step in {options_from} on this machine. Tune it: {TUNE}")
        options = ", ".join(filter(None, step_options(plan).texts))
        clock = common.Clock(version=jax.__version__, dtype=dtype, options=options)
        with plan.layout.use():
            take_steps(plan, clock, common.batch, changed=lambda model: loaded(model, common.weights()))


main()
