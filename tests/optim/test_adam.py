"""AdamW against torch's; `test_family.py` compares it with the published algorithm."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import vocab_axis
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import build_optimizer, parameter_groups

SHAPES = {"w.weight": (5, 4), "norm.weight": (4,), "w.bias": (5,)}


def values(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def nested(flat: dict[str, np.ndarray]) -> dict:
    out: dict = {}
    for name, value in flat.items():
        module, leaf = name.split(".")
        axes = tuple(hax.Axis(f"{name}{i}", n) for i, n in enumerate(value.shape))
        out.setdefault(module, {})[leaf] = hax.named(jnp.asarray(value), axes)
    return out


def trained(config: AdamConfig, num_steps: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    params = nested(values(0))
    optimizer = config.build(parameter_groups(params, config), num_steps)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(num_steps):
        params, state = step(params, state, nested(values(number + 1, scale)))
    return {path: np.asarray(leaf.array) for path, leaf in tree.leaves(params)}


CONFIGS = {
    "usual": AdamConfig(learning_rate=1e-2, weight_decay=0.1, warmup=0.3),
    "no clipping": AdamConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None, lr_schedule="constant"),
    "other numbers": AdamConfig(learning_rate=3e-2, beta1=0.8, beta2=0.9, epsilon=1e-3, max_grad_norm=0.5, warmup=0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_ten_steps_match_torch(name):
    torch = pytest.importorskip("torch")
    config = CONFIGS[name]
    params = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in values(0).items()}
    groups = [
        {"params": [params["w.weight"]], "weight_decay": config.weight_decay},
        {"params": [params["norm.weight"], params["w.bias"]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(config.beta1, config.beta2), eps=config.epsilon)
    for number in range(10):
        for group in optimizer.param_groups:
            group["lr"] = float(config.schedule(10)(number))
        for key, gradient in values(number + 1, 3.0).items():
            params[key].grad = torch.tensor(gradient)
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params.values(), config.max_grad_norm)
        optimizer.step()
    for key, value in trained(config, 10, 3.0).items():
        np.testing.assert_allclose(value, params[key].detach().numpy(), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_bfloat16_parameters_get_the_steps_of_float64(nesterov):
    """In bfloat16, 0.999 is 1, and a second moment that falls by 0.1 % a step would never fall."""
    keys = {"max_grad_norm": None, "nesterov": nesterov, "lr_schedule": "constant", "warmup": 0.0}
    config = AdamConfig(learning_rate=1e-3, beta2=0.999, **keys)
    narrow = lambda flat: jax.tree.map(lambda x: x.astype(jnp.bfloat16), nested(flat))  # noqa: E731
    wide = lambda params: {path: np.asarray(leaf.array).astype(np.float64) for path, leaf in tree.leaves(params)}  # noqa: E731
    params, signs = narrow(values(0)), {k: np.sign(v) for k, v in values(0).items()}
    optimizer = build_optimizer(config, parameter_groups(params, config), 300)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    beta1, beta2 = config.beta1, config.beta2
    mean, square = dict.fromkeys(values(0), 0.0), dict.fromkeys(values(0), 0.0)
    for t in range(1, 301):
        # An entry's gradients have one sign, so that no mean nearly cancels: what is left then is rounding.
        given = narrow({k: np.abs(v) * signs[k] for k, v in values(t, 3.0 if t < 10 else 0.03).items()})
        updates, state = update(given, state, params)
        for k, g in wide(given).items():
            mean[k] = beta1 * mean[k] + (1 - beta1) * g
            square[k] = beta2 * square[k] + (1 - beta2) * g**2
            ahead = beta1 * mean[k] / (1 - beta1 ** (t + 1)) + (1 - beta1) * g / (1 - beta1**t)
            direction = ahead if nesterov else mean[k] / (1 - beta1**t)
            expected = -1e-3 * direction / (np.sqrt(square[k] / (1 - beta2**t)) + config.epsilon)
            np.testing.assert_allclose(wide(updates)[k], expected, rtol=1e-4, atol=1e-8)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.apply_updates(params, updates))} == {jnp.dtype(jnp.bfloat16)}


def abstract(config):
    return jax.eval_shape(lambda: config.build(vocab_axis(64), key=jax.random.PRNGKey(0)))


def test_default_weight_decay_mask():
    models = {
        "gpt2": abstract(Gpt2Config(seq_len=16, hidden_dim=32, num_layers=2, num_heads=4)),
        "llama": abstract(
            LlamaConfig(seq_len=16, hidden_dim=32, intermediate_dim=32, num_layers=2, num_heads=4, num_kv_heads=4)
        ),
    }
    layer = "body.layers.stacked."
    decaying = {
        name: {p for g in parameter_groups(m, AdamConfig(weight_decay=0.1)) if g.weight_decay for p in g.paths}
        for name, m in models.items()
    }
    assert decaying == {
        "gpt2": {f"{layer}attn.{p}_proj.weight" for p in "qkvo"} | {f"{layer}mlp.{p}_proj.weight" for p in ("up", "down")},
        "llama": {f"{layer}attn.{p}_proj.weight" for p in "qkvo"}
        | {f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
        | {"head.weight"},
    }  # fmt: skip


def test_the_table_covers_every_leaf_once_and_a_list_replaces_the_default():
    model = abstract(Gpt2Config(seq_len=16, hidden_dim=32, num_layers=2, num_heads=4))
    groups = parameter_groups(model, AdamConfig(weight_decay=0.1, weight_decay_modules=["tokens", "norm"]))
    paths = [path for group in groups for path in group.paths]
    assert sorted(paths) == sorted(path for path, _ in tree.leaves(model))
    assert sum(g.num_parameters for g in groups) == tree.num_parameters(model)
    decaying = {path for group in groups if group.weight_decay for path in group.paths}
    assert decaying == {path for path in paths if "tokens" in path or "norm" in path}
    with pytest.raises(ConfigError, match="nothing_like_it"):
        parameter_groups(model, AdamConfig(weight_decay_modules=["nothing_like_it"]))
