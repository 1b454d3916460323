"""jaxlm's kernels against references on this device: errors and time. Argument: one JSON object.

    {"attention": [{"rows": 16, "length": 4096, "heads": 32, "kv_heads": 8, "head_size": 64, "documents": 1}],
     "loss": [{"tokens": 65536, "embed": 2048, "vocab": 128256}], "repeats": 10}

Errors are root mean squares relative to the reference. The reference for attention is the `reference` backend in
float32 on one row. The reference for the loss is all logits at once in float32 on a part of the tokens. Seconds are
medians of forward and backward together.
"""

import json
import statistics
import sys
import time
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.core.devices import cuda_capability
from jaxlm.core.sharding import current_platform
from jaxlm.models.attention.api import AttentionMask, AttentionSpec, attention
from jaxlm.models.attention.choose import AttentionTask, choose_attention
from jaxlm.models.base import Inputs
from jaxlm.models.loss import next_token_sums

BFLOAT16 = jnp.dtype(jnp.bfloat16)
TOKENS_OF_REFERENCE = 4096


def seconds_of(fun, *args, repeats) -> float | None:
    """Median seconds; None if it does not fit into memory."""
    compiled = jax.jit(fun)
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        try:
            jax.block_until_ready(compiled(*args))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def error_of(actual, expected) -> float:
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def attend(backend, q, k, v, segments):
    row = lambda a: hax.named(a, ("batch", "position"))  # noqa: E731
    position = jnp.broadcast_to(jnp.arange(q.shape[1]), segments.shape)
    attention_mask = AttentionMask.of(Inputs(row(segments), row(position), row(segments)))
    q = hax.named(q, ("batch", "position", "heads", "head_size"))
    k, v = (hax.named(t, ("batch", "key_position", "kv_heads", "head_size")) for t in (k, v))
    return attention(q, k, v, AttentionSpec(attention_mask, backend=backend)).rearrange(q.axes).array


def both(fun, cotangent):
    """A function that returns `fun`'s results and its gradients with respect to its first three arguments."""

    def run(*args):
        out, vjp = jax.vjp(lambda *some: fun(*some, *args[3:]), *args[:3])
        return out, *vjp(cotangent.astype(out.dtype))

    return run


def compare_attention(case, repeats) -> dict:
    rng = np.random.default_rng(0)
    rows, length, documents = case["rows"], case["length"], case["documents"]
    size = lambda heads: (rows, length, heads, case["head_size"])  # noqa: E731
    random = lambda heads: jnp.asarray(rng.standard_normal(size(heads), np.float32), BFLOAT16)  # noqa: E731
    numbers = [random(case[name]) for name in ("heads", "kv_heads", "kv_heads")]
    starts = np.sort(rng.choice(np.arange(1, length), (documents - 1,), replace=False))
    segments = np.broadcast_to(1 + np.searchsorted(starts, np.arange(length), side="right"), (rows, length))
    segments, d_out = jnp.asarray(segments, jnp.int32), random(case["heads"])
    task = AttentionTask(
        current_platform(),
        BFLOAT16,
        length,
        head_size=case["head_size"],
        group=case["heads"] // case["kv_heads"],
        capability=cuda_capability(jax.devices()[0]),
    )
    choice = choose_attention(task)
    with jax.default_matmul_precision("highest"):
        exact = [a[:1].astype(jnp.float32) for a in numbers]
        reference = jax.jit(both(lambda *args: attend("reference", *args), d_out[:1]))(*exact, segments[:1])
    results: dict[str, Any] = {"chosen": choice.name, "reason": choice.reason}
    for name in dict.fromkeys((choice.name, "blockwise")):
        run = lambda *args, name=name: attend(name, *args)  # noqa: E731
        one = jax.jit(both(run, d_out[:1]))(*(a[:1] for a in numbers), segments[:1])
        errors = [error_of(*pair) for pair in zip(one, reference, strict=True)]
        whole = seconds_of(both(run, d_out), *numbers, segments, repeats=repeats)
        results[name] = {"errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)), "seconds": whole}
    return {**case, **results}


def whole_loss(x, w, y):
    """The definition, with the logits of all tokens at once."""
    logits = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def chunked_loss(x, w, y):
    Batch, Position, Embed, Vocab = Axis("batch", 1), Axis("position", len(y)), Axis("embed", x.shape[1]), len(w)
    rows = hax.named(y[None], (Batch, Position))
    hidden, head = hax.named(x[None], (Batch, Position, Embed)), hax.named(w, (Axis("vocab", Vocab), Embed))
    return next_token_sums(hidden, head, rows, hax.ones((Batch, Position))).total


def compare_loss(case, repeats) -> dict:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((case["tokens"], case["embed"]), np.float32), BFLOAT16)
    w = jnp.asarray(rng.standard_normal((case["vocab"], case["embed"]), np.float32) * 0.02, BFLOAT16)
    y = jnp.asarray(rng.integers(0, case["vocab"], case["tokens"]), jnp.int32)
    ours, theirs = (jax.value_and_grad(loss, argnums=(0, 1)) for loss in (chunked_loss, whole_loss))
    some = slice(min(TOKENS_OF_REFERENCE, case["tokens"]))
    actual = jax.jit(ours)(x[some], w, y[some])
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(theirs)(x[some].astype(jnp.float32), w.astype(jnp.float32), y[some])
    errors = [error_of(*pair) for pair in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)]
    del actual, expected
    return {
        **case,
        "errors": dict(zip(("loss", "dx", "dw"), errors, strict=True)),
        "seconds": seconds_of(ours, x, w, y, repeats=repeats),
        "seconds_all_logits": seconds_of(theirs, x, w, y, repeats=repeats),
    }


def main():
    request = json.loads(sys.argv[1])
    results = {
        "attention": [compare_attention(case, request["repeats"]) for case in request["attention"]],
        "loss": [compare_loss(case, request["repeats"]) for case in request["loss"]],
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(results))


main()
