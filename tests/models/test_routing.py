"""Routers against transformers' and against a sort in float64, and the update of their correction bias."""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.guards import GRADIENT_NORM, SKIPPED
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.interop.hf.families.glm4_moe import Glm4MoeConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.linear import Linear
from jaxlm.models.routing import ChosenSoftmaxRouting, Routes, Routing, SigmoidRouting, SoftmaxRouting
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.muon import MuonConfig
from tests.engine.helpers import AXES, VOCAB, TinyRun, arrays, batch, layout, one_device, phase
from tests.tiers import one_of

BATCH, POSITION, EMBED = Axis("batch", 3), Axis("position", 40), Axis("embed", 16)


def sigmoid(experts=12, chosen=3, groups=1, groups_chosen=1, *, bias=None, step=0.0, **options) -> SigmoidRouting:
    bias = np.zeros(experts) if bias is None else bias
    return SigmoidRouting(
        correction_bias=hax.named(jnp.asarray(bias, jnp.float32), Axis("routes", experts)),
        num_chosen=chosen,
        num_groups=groups,
        groups_chosen=groups_chosen,
        **{"normalised": True, "scale": 1.0, "balance_weight": 0.0, "z_weight": 0.0, "bias_step": step, **options},
    )


def softmax(chosen=3, *, normalised=True) -> SoftmaxRouting:
    return SoftmaxRouting(chosen, normalised, 0.0, 0.0)


def routed(router: Routing, weight: np.ndarray, x: np.ndarray, segments=None, bias=None) -> Routes:
    """Args: weight: [routes, embed]; x: [batch, position, embed]; segments: [batch, position]; bias: [routes]."""
    Route = Axis("routes", weight.shape[0])
    bias = None if bias is None else hax.named(jnp.asarray(bias), Route)
    linear = Linear(hax.named(jnp.asarray(weight), (Route, EMBED)), bias, EMBED, Route)
    segments = np.ones(x.shape[:2], np.int32) if segments is None else segments
    return router(linear(hax.named(jnp.asarray(x), (BATCH, POSITION, EMBED))), hax.named(segments, (BATCH, POSITION)))


def inputs(experts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH.size, POSITION.size, EMBED.size)).astype(np.float32)
    return rng.normal(size=(experts, EMBED.size)).astype(np.float32) * 0.5, x


BIASES = {
    "no bias": lambda rng, n: np.zeros(n),
    "bias of either sign": lambda rng, n: rng.normal(size=n) * 0.3,
    "negative bias": lambda rng, n: -2 - rng.random(n),
    "large bias": lambda rng, n: rng.uniform(6.817, 7.063, n),
}
SHAPES = {
    "no groups": (12, 3, 1, 1),
    "2 of 4 groups": (12, 3, 4, 2),
    "1 of 4 groups": (12, 2, 4, 1),
    "all groups": (12, 5, 3, 3),
    "all experts": (8, 8, 2, 2),
}


def of_transformers(family: str, weight, bias, x, shape, **keys):
    """(ids, shares) of a router of transformers, sorted by id. Among equal scores its first ones are chosen, as ours."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    experts, chosen, groups, groups_chosen = shape
    name = {
        "deepseek_v3": "DeepseekV3",
        "glm4_moe": "Glm4Moe",
        "minimax_m2": "MiniMaxM2",
        "qwen3_moe": "Qwen3Moe",
        "granitemoe": "GraniteMoe",
        "gpt_oss": "GptOss",
    }.get(family, family.title())
    kind = getattr(__import__("transformers"), f"{name}Config")
    counts = {
        "n_routed_experts": experts,
        "num_local_experts": experts,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "n_group": groups,
        "topk_group": groups_chosen,
    }
    known = set(kind().to_dict()) | set(kind.attribute_map)
    config = kind(hidden_size=EMBED.size, **{k: v for k, v in (counts | keys).items() if k in known})
    gate = getattr(module, next(n for n in (f"{name}TopkRouter", f"{name}TopKRouter") if hasattr(module, n)))(config)

    def first_of_equals(scores, k, dim=-1, sorted=True):
        values, ids = torch.sort(scores, dim=dim, descending=True, stable=True)
        return values.narrow(dim, 0, k), ids.narrow(dim, 0, k)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", first_of_equals)
        patch.setattr(torch.Tensor, "topk", first_of_equals)
        gate.weight.copy_(torch.tensor(weight))
        extra = () if hasattr(gate, "e_score_correction_bias") or family != "minimax_m2" else (torch.tensor(bias),)
        if hasattr(gate, "e_score_correction_bias"):
            gate.e_score_correction_bias.copy_(torch.tensor(bias))
        if hasattr(gate, "bias"):
            gate.bias.copy_(torch.tensor(bias))
        _, shares, ids = gate(torch.tensor(x).reshape(-1, EMBED.size), *extra)
    return by_id(ids.numpy(), shares.numpy())


def by_id(ids: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids, shares = (a.reshape(-1, a.shape[-1]) for a in (ids, shares))
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(shares, order, -1)


def check(routes: Routes, expected) -> None:
    ids, shares = by_id(np.asarray(routes.ids.array), np.asarray(routes.shares.array))
    assert shares.dtype == np.float32
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(shares, expected[1], rtol=0, atol=1e-6 * max(1.0, np.abs(expected[1]).max()))


slow = pytest.mark.slow


@pytest.mark.parametrize("ties", [pytest.param(False, id="", marks=slow), pytest.param(True, id="ties")])
@pytest.mark.parametrize(
    "bias", [pytest.param(b, marks=slow if b in ("no bias", "large bias") else ()) for b in BIASES]
)
@pytest.mark.parametrize("shape", [s if "of 4" in s else pytest.param(s, marks=slow) for s in SHAPES])
def test_the_sigmoid_router_equals_those_of_transformers(shape, bias, ties):
    experts, chosen, groups, _ = SHAPES[shape]
    weight, x = inputs(experts)
    b = BIASES[bias](np.random.default_rng(1), experts).astype(np.float32)
    if ties:  # of pairs of experts, of groups, and of all experts for some tokens
        weight[1::2], b[1::2], x[:, ::7] = weight[::2], b[::2], 0.0
    for family in ("deepseek_v3", "glm4_moe"):
        for normalised, scale in ((True, 2.5), (False, 1.0)):
            router = sigmoid(*SHAPES[shape], bias=b, normalised=normalised, scale=scale)
            keys = {"norm_topk_prob": normalised, "routed_scaling_factor": scale}
            check(routed(router, weight, x), of_transformers(family, weight, b, x, SHAPES[shape], **keys))
    if groups == 1:
        check(
            routed(sigmoid(experts, chosen, bias=b), weight, x),
            of_transformers("minimax_m2", weight, b, x, SHAPES[shape]),
        )


@pytest.mark.parametrize("ties", [pytest.param(False, id="", marks=slow), pytest.param(True, id="ties")])
@pytest.mark.parametrize(
    ("family", "normalised"),
    [
        ("mixtral", True),
        ("olmoe", False),
        *(pytest.param(family, True, marks=slow) for family in ("granitemoe", "olmoe", "qwen3_moe")),
    ],
)
def test_the_softmax_router_equals_those_of_transformers(family, normalised, ties):
    weight, x = inputs(12)
    if ties:
        weight[1::2], x[:, ::7] = weight[::2], 0.0
    for chosen in (1, 3, 12):
        expected = of_transformers(family, weight, None, x, (12, chosen, 1, 1), norm_topk_prob=normalised)
        check(routed(softmax(chosen, normalised=normalised), weight, x), expected)


@pytest.mark.parametrize("ties", [pytest.param(False, id="", marks=slow), pytest.param(True, id="ties")])
def test_the_softmax_over_the_chosen_equals_that_of_transformers(ties):
    """The experts of gpt-oss. Some logits are equal, by equal rows and by tokens that have only the bias."""
    weight, x = inputs(12)
    bias = np.random.default_rng(1).normal(size=12).astype(np.float32)
    if ties:
        weight[1::2], bias[1::2], x[:, ::7] = weight[::2], bias[::2], 0.0
    for chosen in (1, 4, 12):
        expected = of_transformers("gpt_oss", weight, bias, x, (12, chosen, 1, 1))
        check(routed(ChosenSoftmaxRouting(chosen, True, 0.0, 0.0), weight, x, bias=bias), expected)


MODEL = Glm4MoeConfig(
    seq_len=16,
    hidden_dim=32,
    intermediate_dim=24,
    shared_expert_intermediate_dim=24,
    dense_intermediate_dim=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=6,
    num_experts_per_token=2,
    num_expert_groups=3,
    num_groups_per_token=2,
    initializer_range=0.2,
)
# Epsilon is above the gradients' rounding errors, which must not cause full-size steps.
ADAM = AdamConfig(learning_rate=1e-3, warmup=0, epsilon=1e-4, weight_decay=0.1, default_weight_decay_mask=False)


def biases(run: TinyRun) -> np.ndarray:
    """[layer, expert]."""
    (bias,) = (leaf for path, leaf in tree.leaves(run.state.model) if path.endswith("correction_bias"))
    return np.asarray(bias.rearrange(("layers", "routes")).array)


def columns(step: int) -> dict[str, np.ndarray]:
    """Eight rows, one of them with padding."""
    made = arrays(step, rows=8)
    made["segment_ids"][3, 9:] = 0
    return made


def loads(run: TinyRun, made: dict[str, np.ndarray]) -> np.ndarray:
    """How often each expert was chosen, [layer, expert], counted one token at a time."""
    inputs_ = Inputs.of(jax.tree.map(lambda c: c["microbatch", 0], batch(made, one_device()), is_leaf=tree.is_named))
    seen: list[np.ndarray] = []
    kept = SigmoidRouting.__call__

    def observed(self, logits, segment_ids):
        routes = kept(self, logits, segment_ids)
        jax.debug.callback(lambda ids: seen.append(np.asarray(ids)), routes.ids.array, ordered=True)
        return routes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SigmoidRouting, "__call__", observed)
        jax.block_until_ready(jax.jit(lambda model: model.hidden(inputs_).final.array)(run.state.model))
        jax.effects_barrier()
    real = made["segment_ids"] != 0
    return np.stack([np.bincount(ids[real].ravel(), minlength=MODEL.num_experts) for ids in seen])


@pytest.mark.slow
def test_each_update_moves_the_biases_of_experts_against_their_load():
    run = TinyRun(one_device(), phase(optimizer=ADAM), model=MODEL)
    assert not biases(run).any()
    for step in range(3):
        before, made = biases(run), columns(step)
        load = loads(run, made)
        assert load.sum(axis=-1).tolist() == [2 * (made["segment_ids"] != 0).sum()]
        run.step(made)
        expected = before - np.float32(0.001) * np.sign(load - load.mean(axis=-1, keepdims=True)).astype(np.float32)
        np.testing.assert_array_equal(biases(run), expected)
    assert biases(run).any()


@pytest.fixture(scope="module")
def whole() -> list[np.ndarray]:
    return after_each_step(TinyRun(one_device(), phase(optimizer=ADAM), model=MODEL))


def after_each_step(run: TinyRun, num_microbatches: int = 1) -> list[np.ndarray]:
    found = []
    for step in range(3):
        run.step(columns(step), num_microbatches)
        found.append(biases(run))
    return found


@pytest.mark.soak
def test_eight_microbatches_move_the_biases_as_one_does(whole):
    run = TinyRun(one_device(), phase(optimizer=ADAM), model=MODEL)
    np.testing.assert_array_equal(after_each_step(run, 8), whole)


@pytest.mark.soak
def test_eight_devices_move_the_biases_as_one_does(whole):
    np.testing.assert_array_equal(after_each_step(TinyRun(layout(), phase(optimizer=ADAM), model=MODEL)), whole)


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", one_of([ADAM, MuonConfig(learning_rate=1e-3, warmup=0)]), ids=["adam", "muon"])
def test_nothing_else_sees_the_biases(optimizer):
    """The norm of the gradient, clipping and the other parameters' updates are those of a model whose biases stay."""
    config = dataclasses.replace(optimizer, max_grad_norm=0.01)
    runs = [
        TinyRun(one_device(), phase(optimizer=config), model=dataclasses.replace(MODEL, router_bias_step=u))
        for u in (0.001, 0.0)
    ]
    metrics = [run.step(columns(0)) for run in runs]
    assert metrics[0][GRADIENT_NORM] == pytest.approx(metrics[1][GRADIENT_NORM], rel=1e-6)
    moving, still = (dict(tree.leaves(run.state.model)) for run in runs)
    for path, leaf in still.items():
        if path.endswith("correction_bias"):
            assert not np.asarray(leaf.array).any()
            assert np.abs(np.asarray(moving[path].array)).max() == np.float32(0.001)
        else:
            np.testing.assert_allclose(moving[path].array, leaf.array, rtol=1e-6, atol=1e-7, err_msg=path)


@slow
def test_a_skipped_step_does_not_move_the_biases():
    run = TinyRun(one_device(), phase(optimizer=ADAM), model=MODEL)
    made = columns(0)
    made["loss_mask"] = np.full_like(made["loss_mask"], np.nan)
    assert run.step(made)[SKIPPED] == 1
    assert not biases(run).any()


@slow
def test_biases_with_step_zero_have_no_gradient_and_stay_as_they_are():
    model = dataclasses.replace(MODEL, router_bias_step=0.0)
    run = TinyRun(one_device(), phase(optimizer=ADAM), model=model)
    run.state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf - 0.7 if "correction_bias" in jax.tree_util.keystr(path) else leaf, run.state
    )
    for step in range(2):
        run.step(columns(step))
    np.testing.assert_array_equal(biases(run), np.float32(-0.7))


def test_the_statistics_of_the_sigmoid_router():
    weight, x = inputs(6)
    segments = np.ones((BATCH.size, POSITION.size), np.int32)
    segments[1, 20:] = 0
    stats = routed(sigmoid(6, 2), weight, x, segments).stats
    scores = 1 / (1 + np.exp(-(x[segments == 1].astype(np.float64) @ weight.T)))
    chosen = np.argsort(-scores, axis=-1)[:, :2]
    np.testing.assert_array_equal(stats.chosen.array, np.bincount(chosen.ravel(), minlength=6))
    expected = (scores / scores.sum(axis=-1, keepdims=True)).sum(axis=0)
    np.testing.assert_allclose(stats.probabilities.array, expected, rtol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("shards", one_of(["model", "data"]))
def test_experts_on_eight_devices_train_as_on_one(shards):
    model = dataclasses.replace(MODEL, num_experts=8, num_expert_groups=4)
    axes = {**AXES, "experts": 8, "mlp": 40}
    mappings = {
        "data": (mesh_shape(8), AxisMappings("batch", ("embed",), (), {"experts": "data"}, {})),
        "model": (mesh_shape(8, model=4), AxisMappings("batch", ("embed",), ("experts", "heads"), {}, {})),
    }
    eight, one = (
        TinyRun(where, phase(optimizer=ADAM), model=model)
        for where in (make_layout(*mappings[shards], axes), one_device())
    )
    for step in range(3):
        found, expected = eight.step(columns(step)), one.step(columns(step))
        for key in ("train/loss", "train/router/balance_loss", "train/router/max_load"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5), key
        np.testing.assert_array_equal(biases(eight), biases(one))
    for (path, ours), (_, wanted) in zip(tree.leaves(eight.state.model), tree.leaves(one.state.model), strict=True):
        np.testing.assert_allclose(ours.array, wanted.array, rtol=0, atol=1e-5, err_msg=path)


@slow
def test_a_packed_row_is_its_documents():
    lengths = (1, 7, 3, 5)  # of 18 tokens, two are padding
    config = dataclasses.replace(MODEL, seq_len=18)
    model = jax.jit(lambda key: config.build(vocab_axis(VOCAB), key=key))(jax.random.key(0))
    read = jax.jit(lambda model, inputs: model.logits(model.hidden(inputs).final).array)
    ids = np.random.default_rng(0).integers(0, VOCAB, 18)

    def logits(ids, lengths):
        """Of these documents, with padding behind them."""
        columns = np.zeros((3, 18), np.int32)
        columns[0, : len(ids)] = ids
        columns[1, : sum(lengths)] = np.concatenate([np.arange(length) for length in lengths])
        columns[2, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        axes = (Axis("batch", 1), Axis("position", 18))
        return np.asarray(read(model, Inputs(*(hax.named(jnp.asarray(c)[None], axes) for c in columns))))[0]

    packed = logits(ids, lengths)
    for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
        alone = logits(ids[start : start + length], (length,))[:length]
        np.testing.assert_allclose(packed[start : start + length], alone, rtol=0, atol=1e-6 * np.abs(alone).max())
