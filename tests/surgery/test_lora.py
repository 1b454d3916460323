"""LoRA: no effect at first, merging keeps the outputs, and adapters are sharded by their axes."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.products.stored_weights import Int8Weight
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.layers import dropout, with_dropout_keys
from jaxlm.models.linear import Linear
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.groups import build_optimizer, parameter_groups
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.lora import LoraConfig
from jaxlm.surgery.lora_layers import AdapterSize, LoraLinear
from tests.engine.helpers import MESHES, TinyRun, arrays, layout, one_device, phase
from tests.engine.helpers import MODEL as TINY
from tests.tiers import one_of

MODEL = LlamaConfig(seq_len=16, hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda key: MODEL.build(vocab_axis(64), key=key))(jax.random.PRNGKey(0))


def adapted(model, **config):
    surgery = LoraConfig(**config)
    check_fields(surgery, "surgery lora")
    return surgery.apply(model, key=jax.random.PRNGKey(1))


def randomised(model):
    """Makes adapters that have an effect, and that fill padding too."""

    def fill(path, leaf):
        rng, shape = np.random.default_rng(len(path)), leaf.array.shape
        if path.endswith(".magnitude"):
            return leaf * hax.named(np.float32(rng.uniform(0.8, 1.2, shape)), leaf.axes)
        if not path.endswith((".a", ".b")):
            return leaf
        return hax.named(jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32), leaf.axes)

    return tree.map_leaves(fill, model)


@jax.jit
def logits(model, key=None):
    axes = (hax.Axis("batch", 3), MODEL.Pos)
    ids = hax.random.randint(jax.random.PRNGKey(2), axes, 0, 64)
    ones = hax.ones(axes, dtype=jnp.int32)
    positions = hax.arange(MODEL.Pos).broadcast_axis(axes[0]).rearrange(axes)
    return model.logits(model.hidden(Inputs(ids, positions, ones), key=key).final).array


def trained_for(num_steps, update, trained, frozen):
    """The trained part after steps of an optimizer."""

    @jax.jit
    def step(trained, state):
        loss = lambda trained: jnp.sum(logits(eqx.combine(trained, frozen, is_leaf=tree.is_named)) ** 2)  # noqa: E731
        change, state = update.update(jax.grad(loss)(trained), state, trained)
        return optax.apply_updates(trained, change), state

    state = jax.jit(update.init)(trained)
    for _ in range(num_steps):
        trained, state = step(trained, state)
    return trained


@pytest.mark.slow
def test_adapters_do_not_change_the_model_at_first(model):
    assert np.array_equal(logits(adapted(model, target="attn|mlp")), logits(model))


@pytest.mark.slow
def test_merging_changes_only_the_trees_structure(model):
    busy = randomised(adapted(model, target="attn|mlp", rank=4))
    assert np.abs(logits(busy) - logits(model)).max() > 1e-2
    merged = LoraConfig(target="attn|mlp").merge(busy)
    np.testing.assert_allclose(logits(merged), logits(busy), atol=1e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)


def test_only_matching_layers_are_adapted(model):
    paths = {path for path, _ in tree.leaves(adapted(model, target=r"q_proj|v_proj"))}
    assert {p for p in paths if p.endswith((".a", ".b"))} == {
        f"body.layers.stacked.attn.{name}_proj.{part}" for name in "qv" for part in "ab"
    }


def test_scale(model):
    def scales(changed):
        is_lora = lambda x: isinstance(x, LoraLinear)  # noqa: E731
        return {m.scale for m in jax.tree.leaves(changed, is_leaf=is_lora) if is_lora(m)}

    assert scales(adapted(model, rank=4, alpha=8.0)) == {2.0}
    assert scales(adapted(model, rank=4, alpha=8.0, rslora=True)) == {4.0}


@pytest.mark.slow
def test_dropout_is_active_only_in_training_and_follows_the_key(model):
    plain = randomised(adapted(model, target="attn|mlp", rank=4))
    dropping = randomised(adapted(model, target="attn|mlp", rank=4, dropout=0.5))
    first, second = jax.random.key(1), jax.random.key(2)
    whole = logits(plain)
    assert np.array_equal(logits(dropping), whole), "without a key nothing is dropped"
    once = logits(dropping, first)
    assert np.array_equal(once, logits(dropping, first))
    for other in (whole, logits(dropping, second)):
        assert np.abs(once - other).max() > 1e-3


@pytest.mark.slow
def test_mean_and_variance_of_dropout_match_the_closed_form():
    """Each input of A is 0 with probability p and multiplied by 1 / (1 - p) otherwise, so an output's variance is
    scale^2 p / (1 - p) sum_i ((B A)_oi x_i)^2."""
    In, Out, probability, samples = hax.Axis("in", 12), hax.Axis("out", 5), 0.3, 40_000
    base = Linear.init(In, Out, std=1.0, key=jax.random.key(0))
    layer = LoraLinear.sized(base, [AdapterSize(3, 2.0)], use_dora=False, dropout=probability, key=jax.random.key(1))
    layer = dataclasses.replace(layer, b=hax.random.normal(jax.random.key(2), layer.b.axes))
    x = hax.random.normal(jax.random.key(3), In)
    draw = jax.vmap(lambda key: layer.with_key(key)(x).array)
    drawn = np.asarray(draw(jax.random.split(jax.random.key(4), samples)), np.float64)
    change = 2.0 * np.asarray(layer.b.array, np.float64) @ np.asarray(layer.a.array, np.float64)
    expected = np.asarray(layer(x).array)
    variance = probability / (1 - probability) * np.sum((change * np.asarray(x.array)) ** 2, axis=1)
    assert np.all(np.abs(drawn.mean(axis=0) - expected) < 4 * np.sqrt(variance / samples))
    np.testing.assert_allclose(drawn.var(axis=0), variance, rtol=0.05)


def test_every_layer_with_dropout_has_its_own_key(model):
    adapted_ = adapted(model, target="attn|mlp", dropout=0.5)
    key = jax.random.key(7)
    keyed = tree.modules(with_dropout_keys(adapted_, key), LoraLinear)
    words = {jax.random.key_data(layer.key).tobytes() for layer in keyed}
    assert len(words) == len(keyed) == 7
    own = {jax.random.key_data(k).tobytes() for n in (2, 3, 7) for k in jax.random.split(key, n)}
    assert not words & own, "and none that a block may split off"
    for unkeyed in (with_dropout_keys(adapted_, None), with_dropout_keys(adapted(model, target="attn|mlp"), key)):
        assert all(layer.key is None for layer in tree.modules(unkeyed, LoraLinear)), "0 is none, to the last bit"


@pytest.mark.slow
def test_the_cheap_policy_saves_the_output_of_an_adapted_layer():
    """And not the products of layer and adapter, which would take 1.65 times the memory of the model without adapters."""
    sizes = {
        "seq_len": 64,
        "hidden_dim": 64,
        "intermediate_dim": 256,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 4,
    }
    config = LlamaConfig(**sizes, gradient_checkpointing="cheap", scan_layers=True)
    plain = config.build(vocab_axis(64), key=jax.random.PRNGKey(0))
    ids = hax.zeros((hax.Axis("batch", 32), config.Pos), dtype=jnp.int32)

    def temporary(model, trainable):
        weights, rest = tree.partition(model, tree.select(model, [trainable]))

        def loss(weights):
            model = eqx.combine(weights, rest, is_leaf=tree.is_named)
            return jnp.sum(model.hidden(Inputs(ids, ids, ids + 1)).final.array ** 2)

        return jax.jit(jax.grad(loss)).lower(weights).compile().memory_analysis().temp_size_in_bytes

    with_adapters = temporary(adapted(plain, target="attn|mlp", rank=2), r"\.[ab]$")
    assert with_adapters < 1.25 * temporary(plain, ".")


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["tp 2 x fsdp 4", "fsdp 8"])
def test_dropout_does_not_depend_on_the_mesh(mesh):
    lora = LoraConfig(target="attn|mlp", rank=4, dropout=0.5)
    dropping = phase(surgeries=(lora,), trainable=(r"\.[ab]$",))
    one, many = TinyRun(one_device(), dropping), TinyRun(layout(**MESHES[mesh]), dropping)
    losses = [[run.step(arrays(i), 2)["train/loss"] for i in range(6)] for run in (one, many)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_the_layer_and_its_gradients_match_peft_with_the_same_mask():
    torch, lora = pytest.importorskip("torch"), pytest.importorskip("peft.tuners.lora")
    In, Out, Row = hax.Axis("in", 12), hax.Axis("out", 5), hax.Axis("row", 7)
    base = Linear.init(In, Out, std=1.0, key=jax.random.key(0))
    layer = LoraLinear.sized(base, [AdapterSize(3, 2.0)], use_dora=False, dropout=0.4, key=jax.random.key(1))
    layer = dataclasses.replace(layer, b=hax.random.normal(jax.random.key(2), layer.b.axes))
    x, key = hax.random.normal(jax.random.key(3), (Row, In)), jax.random.key(4)
    out, pull = jax.vjp(lambda a, b: dataclasses.replace(layer, a=a, b=b, key=key)(x).array, layer.a, layer.b)
    grads = pull(out)

    class SameMask(torch.nn.Module):
        def forward(self, given):
            return given * torch.tensor(np.array(dropout(hax.ones_like(x), 0.4, key).array))

    base = torch.nn.Linear(12, 5, bias=False)
    theirs = lora.Linear(base, "default", lora.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.4), r=3, lora_alpha=6)
    theirs.lora_dropout["default"] = SameMask()
    with torch.no_grad():
        for parameter, ours in (
            (base.weight, layer.base.weight),
            (theirs.lora_A["default"].weight, layer.a),
            (theirs.lora_B["default"].weight, layer.b),
        ):
            parameter.copy_(torch.tensor(np.array(ours.array)))
    expected = theirs(torch.tensor(np.array(x.array)))
    expected.backward(expected.detach())
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    for ours, module in zip(grads, (theirs.lora_A, theirs.lora_B), strict=True):
        np.testing.assert_allclose(ours.array, module["default"].weight.grad.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_dora_and_its_gradients_match_the_closed_form():
    """m (W + s B A) x / ||W + s B A|| + bias, and gradients for which the norm is a constant, in float64."""
    In, Out, Row = hax.Axis("in", 6), hax.Axis("out", 5), hax.Axis("row", 4)
    base = Linear.init(In, Out, std=1.0, key=jax.random.key(0), use_bias=True)
    base = dataclasses.replace(base, bias=hax.random.normal(jax.random.key(5), Out))
    options = {"dropout": 0.0, "use_dora": True, "key": jax.random.key(1)}
    layer = LoraLinear.sized(base, [AdapterSize(3, 2.0)], **options)
    x = hax.random.normal(jax.random.key(3), (Row, In))
    np.testing.assert_allclose(layer(x).array, base(x).array, rtol=1e-5, atol=1e-6)
    scaled = hax.random.uniform(jax.random.key(4), Out, minval=0.5, maxval=2.0)
    layer = dataclasses.replace(layer, b=hax.random.normal(jax.random.key(2), layer.b.axes), magnitude=scaled)
    pulled = lambda a, b, m: dataclasses.replace(layer, a=a, b=b, magnitude=m)(x).array  # noqa: E731

    @jax.jit
    def value_and_pulled(*given):
        out, pull = jax.vjp(pulled, *given)
        return out, pull(out)

    out, found = value_and_pulled(layer.a, layer.b, layer.magnitude)
    w, a, b, m, bias, xs = (
        np.asarray(each.array, np.float64) for each in (base.weight, layer.a, layer.b, layer.magnitude, base.bias, x)
    )
    changed = w + 2.0 * b @ a
    norm = np.linalg.norm(changed, axis=1)
    expected = xs @ changed.T * (m / norm) + bias
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer.merged()(x).array, expected, rtol=1e-5, atol=1e-5)
    d_changed = (expected * (m / norm)).T @ xs
    closed = (2.0 * b.T @ d_changed, 2.0 * d_changed @ a.T, np.sum(expected * (xs @ changed.T), axis=0) / norm)
    for ours, gradient in zip(found, closed, strict=True):
        np.testing.assert_allclose(ours.array, gradient, rtol=1e-4, atol=1e-4)


def test_dora_of_an_int8_weight_has_its_norm():
    In, Out = hax.Axis("in", 6), hax.Axis("out", 5)
    base = Linear.init(In, Out, std=1.0, key=jax.random.key(0))
    stored = dataclasses.replace(base, weight=Int8Weight.of(base.weight, In))
    layer = LoraLinear.sized(stored, [AdapterSize(2, 1.0)], dropout=0.0, use_dora=True, key=jax.random.key(1))
    norms = np.linalg.norm(stored.weight.floats(jnp.float32).array, axis=1)
    np.testing.assert_allclose(layer.magnitude.array, norms, rtol=1e-6)
    np.testing.assert_allclose(layer.merged().weight.array, stored.weight.floats(jnp.float32).array, rtol=1e-6)


UNEQUAL = {
    "target": "q_proj|up_proj",
    "rank": 4,
    "alpha": 8.0,
    "rank_pattern": {r"layers\.1\.attn": 2, "up_proj": 3},
    "alpha_pattern": {r"\.1\.": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"use_dora": True}, *(c for c in ({}, {"rslora": True}))], ids=str)
def test_ranks_and_scales_by_layer(model, changes):
    """As in PEFT: the first pattern that matches decides. Padding has no effect and is not counted."""
    busy = randomised(adapted(model, **UNEQUAL, **changes))
    power = 0.5 if changes.get("rslora") else 1
    q, up = (
        dict(tree.modules_by_path(busy, LoraLinear))[f"body.layers.stacked.{p}"] for p in ("attn.q_proj", "mlp.up_proj")
    )
    assert [(size.rank, size.scale) for size in q.sizes] == [(4, 8 / 4**power), (2, 1 / 2**power)]
    assert [(size.rank, size.scale) for size in up.sizes] == [(3, 8 / 3**power), (3, 1 / 3**power)]
    magnitudes = 2 * (32 + 48) if "use_dora" in changes else 0
    assert tree.num_parameters(busy) - tree.num_parameters(model) == 6 * (32 + 32) + 6 * (32 + 48) + magnitudes
    beyond = hax.arange(q.a.resolve_axis("lora_rank")) >= 2
    layer = hax.arange(q.a.resolve_axis("layers")) == 1
    beyond = (beyond.broadcast_axis(layer.axes) & layer).broadcast_to(q.a.axes)
    wild = tree.map_leaves(
        lambda path, leaf: hax.where(beyond, jnp.nan, leaf) if path.endswith("q_proj.a") else leaf, busy
    )
    np.testing.assert_array_equal(logits(wild), logits(busy))
    merged = LoraConfig(**UNEQUAL).merge(busy)
    np.testing.assert_allclose(logits(merged), logits(busy), atol=1e-5)
    for number in range(2):  # one layer at a time, in NumPy
        size, base = (
            q.sizes[number],
            np.asarray(model.body.layers.stacked.attn.q_proj.weight.array[number]).reshape(32, 32),
        )
        a = np.asarray(q.a.array[number, : size.rank]).reshape(size.rank, 32)
        b = np.asarray(q.b.array[number]).reshape(32, -1)[:, : size.rank]
        changed = base + size.scale * b @ a
        if "use_dora" in changes:
            magnitude = np.asarray(q.magnitude.array[number]).reshape(32, 1)
            changed *= magnitude / np.linalg.norm(changed, axis=1, keepdims=True)
        found = np.asarray(merged.body.layers.stacked.attn.q_proj.weight.array[number]).reshape(32, 32)
        np.testing.assert_allclose(found, changed, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("use_dora", one_of([True, False]))
def test_a_layer_without_an_adapter_stays_as_it_is(model, use_dora):
    """To the last bit, after two steps with weight decay."""
    config = LoraConfig(target="attn|mlp", layers_to_transform=[1], use_dora=use_dora)
    changed = config.apply(model, key=jax.random.key(1))
    trained, frozen = tree.partition(changed, tree.select(changed, [r"\.(a|b|magnitude)$"]))
    update = optax.adamw(0.1, weight_decay=0.5)
    trained = trained_for(2, update, trained, frozen)
    stepped = eqx.combine(trained, frozen, is_leaf=tree.is_named)
    for path, leaf in tree.leaves(trained):
        if leaf is not None:
            assert not leaf["layers", 0].array.any(), path
            assert leaf["layers", 1].array.any(), path
    merged = dict(tree.leaves(config.merge(stepped)))
    for path, weight in tree.leaves(model):
        found = merged[path]
        if "layers" in path:
            np.testing.assert_array_equal(found["layers", 0].array, weight["layers", 0].array, err_msg=path)
    per_layer = sum(tree.sizes(changed)[path] for path, _ in tree.leaves(changed) if path.endswith((".a", ".b")))
    assert per_layer * 2 == sum(
        leaf.size for path, leaf in tree.leaves(adapted(model, target="attn|mlp")) if path.endswith((".a", ".b"))
    )


_TABLES = [
    (False, "^tokens$", False),
    (True, "^tokens$", False),
    (True, "^head$", False),
    (True, "^(tokens|head)$", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "embeddings", "shared", "use_dora"),
    [
        (True, "^(tokens|head)$", False, True),
        (True, "^tokens$", True, False),
        *((*case, False) for case in _TABLES),
        *((*case, True) for case in _TABLES[:3]),
    ],
)
def test_adapters_of_embeddings(tied, embeddings, shared, use_dora):
    """They change nothing at first; merged, rows and head are those of the closed form."""
    plain = dataclasses.replace(MODEL, tie_word_embeddings=tied).build(vocab_axis(64), key=jax.random.key(0))
    config = {"target": None, "embeddings": embeddings, "rank": 3, "alpha": 6.0, "use_dora": use_dora}
    config |= {"ensure_weight_tying": shared}
    new = adapted(plain, **config)
    np.testing.assert_allclose(logits(new), logits(plain), rtol=1e-5, atol=1e-6)
    busy = randomised(new)
    merged = LoraConfig(**config).merge(busy)
    np.testing.assert_allclose(logits(merged), logits(busy), atol=1e-5)
    weight = np.asarray(plain.tokens.weight.array)

    def changed(change, transposed):
        if change is None:
            return weight
        a, b = (np.asarray(array.array) for array in (change.a, change.b))
        delta = 2.0 * b @ a
        out = (weight.T if transposed else weight) + delta
        if use_dora:
            out *= np.asarray(change.magnitude.array)[:, None] / np.linalg.norm(out, axis=1, keepdims=True)
        return out.T if transposed else out

    rows = changed(busy.tokens.lookup, True)
    ids = hax.arange(plain.Vocab).rename({"vocab": "token"})
    np.testing.assert_allclose(merged.tokens(ids).array, rows, atol=1e-6)
    if tied:
        expected = rows if shared else changed(busy.tokens.head, False)
        np.testing.assert_allclose(merged.lm_head().array, expected, atol=1e-6)
    if not tied or shared:
        assert jax.tree.structure(merged) == jax.tree.structure(plain)
        assert LoraConfig(**config).exported(busy, merged) is merged
    else:
        with pytest.raises(ConfigError, match="the token embedding and the head that is tied to it differ"):
            LoraConfig(**config).exported(busy, merged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "lion", "muon", "soap"])
def test_optimizers_leave_padding_zero(model, kind):
    changed = randomised(adapted(model, **UNEQUAL, use_dora=True))
    changed = tree.map_modules(
        changed, LoraLinear, ".*", lambda layer: dataclasses.replace(layer, a=layer.change.inner)
    )
    trained, frozen = tree.partition(changed, tree.select(changed, [r"q_proj\.(a|magnitude)$"]))
    config = OptimizerConfig.get_known_choices()[kind](learning_rate=0.1, weight_decay=0.1, warmup=0)
    update = build_optimizer(config, parameter_groups(trained, config), 10)
    a = dict(tree.leaves(trained_for(3, update, trained, frozen)))["body.layers.stacked.attn.q_proj.a"]
    assert not a["layers", 1, "lora_rank", 2:].array.any()
    assert a["layers", 1, "lora_rank", :2].array.all()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", one_of(["tp 2 x fsdp 4", "fsdp 8"]))
@pytest.mark.parametrize("tied", one_of([True, False]))
def test_adapters_of_every_kind_do_not_depend_on_the_mesh(mesh, tied):
    """DoRA, ranks by layer, embeddings and heads. The losses of four steps, and the adapters after them."""
    keys = {**UNEQUAL, "target": r"attn|mlp|^head$", "use_dora": True, "embeddings": "tokens|head"}
    sharded = phase(surgeries=(LoraConfig(**keys),), trainable=(r"\.(a|b|magnitude)$",))
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    one, many = (TinyRun(where, sharded, model=config) for where in (one_device(), layout(**MESHES[mesh])))
    losses = [[run.step(arrays(i), 2)["train/loss"] for i in range(4)] for run in (one, many)]
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for (path, ours), (_, expected) in zip(tree.leaves(many.state.model), tree.leaves(one.state.model), strict=True):
        np.testing.assert_allclose(ours.array, expected.array, rtol=1e-4, atol=1e-4, err_msg=path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"target": "nothing"}, "q_proj"),
        ({"target": None}, "target, embeddings and experts are null"),
        ({"embeddings": "head"}, "embeddings: 'head' given, but it matches none of tokens"),
        ({"embeddings": "tokens", "ensure_weight_tying": True}, "needs a head that is tied"),
        ({"rank_pattern": {"nothing": 2}}, "rank_pattern: 'nothing' matches no layer. Closest names: .*layers.0"),
        ({"alpha_pattern": {"(": 2.0}}, "alpha_pattern: '.' is not a valid regular expression"),
        ({"layers_to_transform": [1, 2]}, "layers_to_transform: 2 given, but the matching layers are numbered 0 to 1"),
        ({"layers_to_transform": []}, "layers_to_transform: an empty list given"),
        ({"modules_to_save": ["nothing"]}, "modules_to_save: 'nothing' matches no parameter"),
        ({"rank_pattern": {"attn": -1}}, "rank_pattern.*-1 given"),
        ({"rank": 0}, "rank: 0 given"),
        ({"dropout": 1.0}, "dropout: 1.0 given"),
        (
            {"rank_pattern": {"attn": 2, "q_proj": 4}},
            "rank_pattern: 'q_proj' has no effect: the first .* match an earlier one: 'attn'. Put 'q_proj' before them",
        ),
        (
            {"alpha_pattern": {r"layers\.0": 2.0, "attn": 4.0, r"layers\.1": 1.0, "k_proj": 3.0}},
            r"alpha_pattern: 'k_proj' has no effect: .* match an earlier one: 'layers\\.0', 'attn'\. Put",
        ),
        (
            {"layers_to_transform": [1], "rank_pattern": {"attn": 3, r"layers\.0\.mlp": 2}},
            r"rank_pattern: 'layers\\.0\\.mlp' has no effect: it matches only body\.layers\.0\.mlp.* layers_to.*: \[1\]",
        ),
        (
            {"layers_to_transform": [1], "alpha_pattern": {r"layers\.1\.attn": 3.0, "attn": 2.0}},
            r"alpha_pattern: 'attn' has no effect: .* match an earlier one: 'layers\\.1\\.attn'\. Put",
        ),
        ({"rank_pattern": {".": 0}}, "rank_pattern: gives rank 0 to all matching layers"),
        (
            {"target": None, "embeddings": "tokens", "rank_pattern": {"^tokens$": 0}},
            "rank_pattern: gives rank 0 to all matching layers",
        ),
        ({"target": None, "embeddings": "tokens", "dropout": 0.1}, "which has no effect: only tables have adapters"),
        ({"dropout": 0.1}, "head gets an adapter. The loss reads its weight directly"),
    ],
)
def test_impossible_surgeries_are_refused(model, config, named):
    with pytest.raises(ConfigError, match=named):
        adapted(model, **config)


@pytest.mark.parametrize("target", ["q_proj", "attn|mlp", r"q_proj$", r"q_proj\.base|mlp", ".*"])
def test_a_layer_has_one_adapter(model, target):
    once = adapted(model, target="q_proj|^head$")
    where = (
        r"matches body\.layers\.stacked\.attn\.q_proj.*already has an adapter"
        if target != r"q_proj$"
        else "no Linear layer"
    )
    with pytest.raises(ConfigError, match=where):
        adapted(once, target=target)


@pytest.mark.slow
def test_successive_surgeries_adapt_different_layers(model):
    """Dropout is refused only for layers that this surgery adapts, not for the head of an earlier one."""
    surgeries = LoraConfig(target="^head$"), LoraConfig(target="attn|mlp", dropout=0.1)
    both = model
    for lora in surgeries:
        both = lora.apply(both, key=jax.random.key(1))
    both = randomised(both)
    merged = merge_surgeries(both, surgeries)
    np.testing.assert_allclose(logits(merged), logits(both), atol=1e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    with pytest.raises(ConfigError, match=r"head gets an adapter\. The loss reads its weight directly"):
        adapted(adapted(model, target="attn|mlp"), target="^head$", dropout=0.1)


def test_surgery_can_be_traced_and_adapters_have_their_layers_axes(model):
    abstract = eqx.filter_eval_shape(lambda m: adapted(m, target="down_proj", rank=4), model)
    axes = {
        path: tuple(ax.name for ax in leaf.axes) for path, leaf in tree.leaves(abstract) if path.endswith((".a", ".b"))
    }
    assert axes == {
        "body.layers.stacked.mlp.down_proj.a": ("layers", "lora_rank", "mlp"),
        "body.layers.stacked.mlp.down_proj.b": ("layers", "embed", "lora_rank"),
    }
