"""Run by test_sharding.py, as a process, on eight simulated devices; prints its results as one JSON object."""

import functools
import json
import re
import sys

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis, with_traits
from jaxlm.models.inference.generate import generate
from jaxlm.models.loss import token_losses
from jaxlm.objectives.next_token import NextToken

VOCAB, ROWS, LENGTH = 64, 16, 16
SIZES = {"seq_len": LENGTH, "hidden_dim": 32, "num_layers": 3, "num_heads": 4, "initializer_range": 0.1}
MODELS = {
    "gpt2": Gpt2Config(**SIZES),
    "llama": LlamaConfig(intermediate_dim=48, num_kv_heads=2, gradient_checkpointing=False, **SIZES),
}
TENSOR = ("mlp", "heads")
LAYOUTS = {
    "fsdp8": (mesh_shape(8, replica=1, model=1), ()),
    "tp2_fsdp4": (mesh_shape(8, replica=1, model=2), TENSOR),
    "tp2_fsdp4_vocab": (mesh_shape(8, replica=1, model=2), (*TENSOR, "vocab")),
    "hsdp2x4": (mesh_shape(8, replica=2, model=1), ()),
}
SOFT_CAPS = {"gpt2": None, "llama": 0.5}
OBJECTIVE = NextToken(z_loss_weight=1e-3, label_smoothing=0.1)


def is_named(leaf):
    return isinstance(leaf, hax.NamedArray)


def a_batch():
    axes = (Axis("batch", ROWS), Axis("position", LENGTH))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, size=(ROWS, LENGTH))
    columns = [tokens, np.roll(tokens, -1, 1), rng.random((ROWS, LENGTH)) < 0.8, np.ones_like(tokens)]
    columns.append(np.broadcast_to(np.arange(LENGTH), tokens.shape))
    dtypes = [jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32]
    return TokenBatch(*(hax.named(jnp.asarray(c, d), axes) for c, d in zip(columns, dtypes, strict=True)))


def step(model, batch):
    def loss(model):
        terms, metrics, _ = OBJECTIVE.terms(model, batch, None, key=None)
        hidden = model.hidden(inputs_of(batch)).final
        hidden, cap = jax.lax.stop_gradient(hidden), model.traits.logit_soft_cap
        evaluation = token_losses(hidden, model.lm_head(), batch.targets, soft_cap=cap)
        return terms["loss"].mean(), ({k: v.mean() for k, v in metrics.items()}, evaluation.array)

    (value, (metrics, evaluation)), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    return value, metrics, evaluation, gradient


def inputs_of(batch):
    return Inputs(batch.tokens, batch.positions, batch.segment_ids)


def decoded(model):
    return generate(model, [[1, 2, 3], [4], [5, 6]], max_new_tokens=6, temperature=0.0)


def placed(tree, sharding):
    put = lambda leaf: hax.NamedArray(jax.device_put(leaf.array, sharding(leaf.axes)), leaf.axes)  # noqa: E731
    return jax.tree.map(put, tree, is_leaf=is_named)


def difference(got, expected):
    """The largest difference, relative to the leaf's largest value plus a hundredth of the whole tree's.

    The second part is for leaves that are zero except for rounding, such as the gradient of key biases.
    """
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True)]
    floor = 0.01 * max(np.abs(b).max() for _, b in pairs)
    return max(float(np.abs(a - b).max() / (np.abs(b).max() + floor)) for a, b in pairs)


def collectives(hlo):
    """(name, number of elements of each result) of every collective of a compiled program."""
    for line in hlo.splitlines():
        match = re.search(r"= (.*?) (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"f32\[([\d,]*)\]", match[1])
            yield match[2], [int(np.prod([int(n) for n in s.split(",") if n] or [1])) for s in shapes]


def look(model, batch, single, layout):
    jax.clear_caches()  # jit caches know the mesh, but not the axis mapping
    with layout.use():
        model, batch = placed(model, layout.parameter_sharding), placed(batch, layout.compute_sharding)
        lowered = jax.jit(step).lower(model, batch)
        compiled = lowered.compile()
        results = compiled(model, batch)
        gradient = jax.tree.leaves(results[3])
        text = decoded(model)
    hlo = compiled.as_text()
    operations = list(collectives(hlo))
    spread = [leaf for leaf in jax.tree.leaves(model.body.layers, is_leaf=is_named) if leaf.has_axis("embed")]
    whole = [leaf.array.shape for leaf in spread if f"f32[{','.join(map(str, leaf.array.shape))}]" in hlo]
    return {
        "difference": difference(results, single),
        "gradient_at_rest": all(
            g.sharding.is_equivalent_to(p.sharding, p.ndim)
            for g, p in zip(gradient, jax.tree.leaves(model), strict=True)
        ),
        "largest_gather": max(n for name, sizes in operations if name == "all-gather" for n in sizes),
        "scatters": [n for name, sizes in operations if name == "reduce-scatter" for n in sizes],
        "whole_stacks": whole,
        "text": text,
    }


def main(config, soft_cap, layouts):
    build = functools.partial(config.build, vocab_axis(VOCAB))
    model, batch = jax.jit(lambda key: build(key=key))(jax.random.key(0)), a_batch()
    model = with_traits(model, logit_soft_cap=soft_cap)
    single = jax.jit(step)(model, batch)
    leaves = [leaf for leaf in jax.tree.leaves(model, is_leaf=is_named) if is_named(leaf)]
    sizes = {axis.name: axis.size for leaf in leaves for axis in leaf.axes}
    report = {"layer": sum(leaf.size for leaf in jax.tree.leaves(model.body.layers)) // config.num_layers}
    report["text"] = decoded(model)
    for name in layouts:
        shape, tensor = LAYOUTS[name]
        layout = make_layout(shape, AxisMappings("batch", ("embed",), tensor, {}, {}), sizes)
        report[name] = look(model, batch, single, layout)
    print(json.dumps(report))


if __name__ == "__main__":
    _, family, *wanted = sys.argv
    main(MODELS[family], SOFT_CAPS[family], wanted)
