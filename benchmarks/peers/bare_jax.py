"""A bare JAX step: plain functions, optax, one jit. Arguments: scan | unroll, microbatches, compilation cache."""

import itertools
import sys

import common
import jax
import jax.numpy as jnp
import optax


def parameters(given):
    ones, zeros = (lambda *s: jnp.ones((common.LAYERS, *s))), (lambda *s: jnp.zeros((common.LAYERS, *s)))
    stack = lambda name: jnp.stack([given[f"{i}.{name}"] for i in range(common.LAYERS)])  # noqa: E731
    blocks = {name: stack(name) for name in ("q", "k", "v", "o", "up", "down")}
    blocks |= {f"{name}_bias": zeros(common.HIDDEN) for name in ("q", "k", "v", "o", "down")} | {
        "up_bias": zeros(4 * common.HIDDEN)
    }
    blocks |= {
        "norm1": ones(common.HIDDEN),
        "norm2": ones(common.HIDDEN),
        "shift1": zeros(common.HIDDEN),
        "shift2": zeros(common.HIDDEN),
    }
    rest = {"tokens": given["tokens"], "positions": given["positions"]}
    return {"blocks": blocks, **rest, "norm": jnp.ones(common.HIDDEN), "shift": jnp.zeros(common.HIDDEN)}


def norm(x, scale, shift):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def block(x, p):
    heads = lambda a: a.reshape(*a.shape[:2], common.HEADS, -1)  # noqa: E731
    h = norm(x, p["norm1"], p["shift1"])
    q, k, v = (heads(h @ p[n] + p[f"{n}_bias"]) for n in ("q", "k", "v"))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ p["o"] + p["o_bias"]
    h = norm(x, p["norm2"], p["shift2"])
    return x + jax.nn.gelu(h @ p["up"] + p["up_bias"], approximate=True) @ p["down"] + p["down_bias"]


def loss_of(params, inputs, targets, *, scan):
    x = params["tokens"][inputs] + params["positions"]
    if scan:
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"])
    else:
        for i in range(common.LAYERS):
            x = block(x, jax.tree.map(lambda a, i=i: a[i], params["blocks"]))
    logits = norm(x, params["norm"], params["shift"]) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main():
    scan, micro = sys.argv[1] == "scan", int(sys.argv[2])
    clock = common.Clock(version=jax.__version__)
    jax.config.update("jax_compilation_cache_dir", sys.argv[3])
    params = parameters(common.weights())
    decayed = jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("q", "k", "v", "o", "up", "down"), params
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(common.CLIP),
        optax.adamw(
            common.LEARNING_RATE, *common.BETAS, common.EPSILON, weight_decay=common.WEIGHT_DECAY, mask=decayed
        ),
    )

    def step(params, state, inputs, targets):
        def piece(total, rows):
            value, gradient = jax.value_and_grad(loss_of)(params, *rows, scan=scan)
            return jax.tree.map(jnp.add, total, (value, gradient)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        rows = [a.reshape(micro, common.BATCH // micro, common.SEQ_LEN) for a in (inputs, targets)]
        (value, gradient), _ = jax.lax.scan(piece, zero, tuple(rows))
        value, gradient = jax.tree.map(lambda a: a / micro, (value, gradient))
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step, donate_argnums=(0, 1))
    state = optimizer.init(params)
    for number in itertools.count():
        params, state, loss = step(params, state, *common.batch(number))
        if not clock.tick(loss):
            break


main()
