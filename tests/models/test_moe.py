"""Mixtures of experts: grouped products, router losses, and experts sharded over devices."""

import dataclasses
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.precision import PrecisionConfig, PrecisionRuleConfig, parse_precision
from jaxlm.interop.hf.families.gpt_oss import GptOssConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.interop.hf.families.qwen2_moe import Qwen2MoeConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.models.base import vocab_axis
from jaxlm.models.experts.grouped_products import Grouping
from jaxlm.models.moe import Experts, num_active
from jaxlm.models.routing import RouterStats
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.reading.decode import encode
from tests.engine.helpers import AXES, TinyRun, arrays, one_device, phase
from tests.fields.proofs import Outcome
from tests.interop.cases import inputs_of
from tests.small_runs import MODELS
from tests.small_runs import tree as tree_of_run

CONFIG = MixtralConfig(
    seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    num_experts=8,
    initializer_range=0.2,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.01,
)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [37, *(n for n in (1, 300))])
def test_grouped_products_equal_ragged_dot(num_rows):
    """Values and gradients, with empty groups and rows that are in no group."""
    rng = np.random.default_rng(num_rows)
    group = jnp.asarray(rng.choice([-1, 0, 2, 3, 5, 9], num_rows))
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((num_rows, 6), (6, 6, 5)))
    order = np.argsort(np.where((group >= 0) & (group < 6), group, 6), kind="stable")
    sizes = jnp.asarray([int(np.sum(group == g)) for g in range(6)])
    weight = jnp.asarray(rng.normal(size=(num_rows, 5)), jnp.float32)

    def ours(x, w):
        grouping = Grouping.of(group, 6)
        out = grouping.order.back(grouping.dot(grouping.order.into(x), w))
        return jnp.sum(out * weight), out

    def ragged(x, w):
        inside = jnp.arange(num_rows)[:, None] < sizes.sum()
        out = jnp.where(inside, jax.lax.ragged_dot(x[order], w, sizes), 0)[np.argsort(order)]
        return jnp.sum(out * weight), out

    (found, expected) = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(x, w) for f in (ours, ragged))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def mesh(model: int, tensor_parallel: tuple[str, ...], **both: str):
    axes = {**AXES, "experts": 8}
    return make_layout(mesh_shape(8, model=model), AxisMappings("batch", ("embed",), tensor_parallel, both, {}), axes)


LAYOUTS = {
    "experts 2 x fsdp 4": lambda: mesh(2, ("experts", "heads")),
    "fsdp 8": lambda: mesh(1, ()),
    "mlp 2 x fsdp 4": lambda: mesh(2, ("mlp", "heads")),
    "experts over data 8": lambda: mesh(1, (), experts="data"),
    "experts over data 4, mlp over 2": lambda: mesh(2, ("mlp", "heads"), experts="data"),
}


@pytest.fixture(scope="module")
def alone():
    return trained(one_device())


def trained(where, model=CONFIG):
    # Epsilon is above the gradients' rounding errors, which must not cause full-size steps.
    adam = AdamConfig(learning_rate=1e-2, warmup=0, epsilon=1e-4)
    run = TinyRun(where, phase(optimizer=adam), model=model)
    metrics = [run.step(arrays(step)) for step in range(3)]
    return metrics, [(path, np.asarray(leaf.array)) for path, leaf in tree.leaves(run.state.model)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "experts 2 x fsdp 4" else pytest.mark.soak) for n in LAYOUTS]
)
def test_training_on_eight_devices_equals_training_on_one(alone, name):
    (metrics, parameters), (expected, wanted) = trained(LAYOUTS[name]()), alone
    for step, reference in zip(metrics, expected, strict=True):
        for key in ("train/objective", "train/loss", "train/router/balance_loss", "train/router/z_loss"):
            assert step[key] == pytest.approx(reference[key], rel=1e-5), key
        assert step["train/router/max_load"] == pytest.approx(reference["train/router/max_load"], rel=1e-6)
        added = 0.1 * step["train/router/balance_loss"] + 0.01 * step["train/router/z_loss"]
        assert step["train/objective"] == pytest.approx(step["train/loss"] + added, rel=1e-5)
    for (path, ours), (_, theirs) in zip(parameters, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=path)


@pytest.mark.soak
def test_a_shared_expert_trains_the_same_on_eight_devices():
    sizes = {name: getattr(CONFIG, name) for name in ("seq_len", "hidden_dim", "intermediate_dim", "num_layers")}
    model = Qwen2MoeConfig(
        **sizes, num_heads=4, num_experts=8, shared_expert_intermediate_dim=48, initializer_range=0.2
    )
    expected, wanted = trained(one_device(), model)
    axes = {**AXES, "experts": 8, "shared_mlp": 48}
    mappings = AxisMappings("batch", ("embed",), ("mlp", "shared_mlp", "heads"), {}, {})
    metrics, parameters = trained(make_layout(mesh_shape(8, model=2), mappings, axes), model)
    for step, reference in zip(metrics, expected, strict=True):
        assert step["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-5)
    assert any("shared_expert.gate" in path for path, _ in parameters)
    for (path, ours), (_, theirs) in zip(parameters, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=path)


def test_the_balance_loss_equals_transformers():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 24, 5)).astype(np.float32)
    real = rng.random((4, 6)) < 0.7
    chosen = np.stack([np.bincount(np.argsort(-l[real.ravel()])[:, :2].ravel(), minlength=5) for l in logits])
    softmax = np.asarray(jax.nn.softmax(logits))[:, real.ravel()]
    Layers, Expert = Axis("layers", 3), Axis("routes", 5)
    sums = RouterStats(
        hax.named(jnp.asarray(chosen, jnp.float32), (Layers, Expert)),
        hax.named(jnp.asarray(softmax.sum(axis=1)), (Layers, Expert)),
        hax.zeros(Layers),
        hax.full(Layers, float(real.sum())),
        balance_weight=0.5,
        z_weight=0.0,
        num_chosen=2,
    )
    found = sums.aux_losses()["router/balance_loss"]
    mask = torch.tensor(real).float()
    expected = theirs(tuple(torch.tensor(l) for l in logits), 5, 2, mask)
    assert float(found.sum.mean()) == pytest.approx(expected.item(), rel=1e-5)
    assert found.coefficient == 0.5


def test_flops_count_only_the_chosen_experts():
    """Mixtral 8x7B: 46.7e9 parameters, of which 12.9e9 are active per token (Jiang et al. 2024, section 1)."""
    config = MixtralConfig(seq_len=4096)
    model = jax.eval_shape(lambda: config.build(vocab_axis(32000), key=jax.random.key(0)))
    assert tree.num_parameters(model) / 1e9 == pytest.approx(46.7, abs=0.05)
    assert num_active(model) / 1e9 == pytest.approx(12.9, abs=0.05)
    embedding, norms = 32000 * 4096, 65 * 4096
    matrices = num_active(model) - embedding - norms
    assert config.flops_per_token(32000).palm == 6 * matrices + 12 * 32 * 4096 * 4096
    more = dataclasses.replace(config, num_experts=16).flops_per_token(32000).palm
    assert more - config.flops_per_token(32000).palm == 6 * 32 * 8 * 4096  # only the routers grow


def test_flops_count_the_shared_expert():
    """Qwen1.5 MoE: 14.3e9 parameters, of which 2.7e9 are active per token (its model card)."""
    config = Qwen2MoeConfig()
    model = jax.eval_shape(lambda: config.build(vocab_axis(151936), key=jax.random.key(0)))
    assert tree.num_parameters(model) / 1e9 == pytest.approx(14.3, abs=0.05)
    assert num_active(model) / 1e9 == pytest.approx(2.7, abs=0.05)
    embedding, norms, biases = 151936 * 2048, 49 * 2048, 24 * 3 * 2048
    matrices = num_active(model) - embedding - norms - biases
    assert config.flops_per_token(151936).palm == 6 * matrices + 12 * 24 * 2048 * 8192


@pytest.mark.parametrize(("layers", "experts", "total", "active"), [(24, 32, 20.91, 3.61), (36, 128, 116.83, 5.13)])
def test_flops_count_windows_and_no_biases(layers, experts, total, active):
    """gpt-oss: the parameters in table 1 of its model card (arXiv:2508.10925), where the embedding is not active."""
    config = GptOssConfig(seq_len=4096, num_layers=layers, num_experts=experts)
    model = jax.eval_shape(lambda: config.build(vocab_axis(201088), key=jax.random.key(0)))
    assert tree.num_parameters(model) / 1e9 == pytest.approx(total, abs=0.005)
    others = num_active(model) - 201088 * 2880
    assert others / 1e9 == pytest.approx(active, abs=0.005)
    norms, sinks = (2 * layers + 1) * 2880, layers * 64
    biases = layers * ((64 + 2 * 8) * 64 + 2880 + experts + 4 * 3 * 2880)
    keys = layers / 2 * (2048 + 128 - 128**2 / 8192)
    assert config.flops_per_token(201088).causal == 6 * (others - norms - sinks - biases) + 12 * 4096 * keys


def test_flops_of_a_model_with_dense_layers():
    config = Qwen2MoeConfig(decoder_sparse_step=3, mlp_only_layers=[2], dense_intermediate_dim=5632)
    model = jax.eval_shape(lambda: config.build(vocab_axis(151936), key=jax.random.key(0)))
    assert [stack.Layers.size for stack in model.body.stacks] == [17, 7]
    embedding, norms, biases = 151936 * 2048, 49 * 2048, 24 * 3 * 2048
    matrices = num_active(model) - embedding - norms - biases
    assert config.flops_per_token(151936).palm == 6 * matrices + 12 * 24 * 2048 * 8192


@pytest.mark.soak
@pytest.mark.parametrize("experts", [pytest.param("experts 2 x fsdp 4", marks=pytest.mark.soak), "experts over data 8"])
def test_dense_and_expert_layers_train_the_same_on_eight_devices(experts):
    sizes = {
        name: getattr(CONFIG, name) for name in ("seq_len", "hidden_dim", "intermediate_dim", "router_aux_loss_coef")
    }
    model = Qwen3MoeConfig(
        **sizes,
        **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_token": 2},
        **{"num_layers": 5, "decoder_sparse_step": 2, "dense_intermediate_dim": 32, "initializer_range": 0.2},
    )
    (expected, wanted), (metrics, parameters) = trained(one_device(), model), trained(LAYOUTS[experts](), model)
    for step, reference in zip(metrics, expected, strict=True):
        for key in ("train/objective", "train/loss", "train/router/balance_loss"):
            assert step[key] == pytest.approx(reference[key], rel=1e-5), key
    assert {path.split(".")[1] for path, _ in parameters if path.startswith("body.")} == {"0", "1"}
    for (path, ours), (_, theirs) in zip(parameters, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_the_balance_loss_of_mixed_layers_equals_that_of_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24, "head_dim": 8},
        **{"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48},
        **{"num_experts": 5, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "initializer_range": 0.5},
    )
    theirs = transformers.Qwen3MoeForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    opened = open_folder(tmp_path)
    abstract = jax.eval_shape(lambda key: opened.config.build(vocab_axis(61), key=key), jax.random.key(0))
    model = load_model(tmp_path, abstract, opened.config, one_device())
    ids = np.random.default_rng(0).integers(0, 61, size=(2, 48))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), output_router_logits=True).aux_loss.item()
    found = jax.jit(lambda model: model.hidden(inputs_of(ids)).aux["router/balance_loss"].sum.mean())(model)
    assert float(found) == pytest.approx(expected, rel=1e-5)


BF16 = "p=f32,c=bfloat16"
FLOAT32_ROUTER = PrecisionConfig(BF16, [PrecisionRuleConfig(r"\.router\.", compute="float32")])


def experts_of(mp) -> Experts:
    """One layer's experts, cast as the step casts them."""
    return parse_precision(mp).cast_to_compute({"mlp": CONFIG.block(key=jax.random.key(0)).mlp})["mlp"]


def routed(experts: Experts, x: np.ndarray):
    """(logits, output) of the experts for [batch, position, embed] in bfloat16."""
    axes = (Axis("batch", x.shape[0]), Axis("position", x.shape[1]), Axis("embed", x.shape[2]))
    x_named = hax.named(jnp.asarray(x, jnp.bfloat16), axes)

    @jax.jit
    def run(experts, x):
        return experts.router(experts.router.operand(x)), experts(x, hax.ones(axes[:2], jnp.int32))[0]

    return run(experts, x_named)


@pytest.mark.slow
def test_a_float32_router_in_a_bfloat16_model_equals_that_of_transformers():
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    x = np.asarray(np.random.default_rng(0).normal(size=(2, 16, 32)).astype(jnp.bfloat16), np.float32)
    experts = experts_of(FLOAT32_ROUTER)
    theirs = mixtral.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, experts_implementation="eager"
    )
    block = mixtral.MixtralSparseMoeBlock(theirs).to(torch.bfloat16)
    block.gate.float()
    block.gate.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    weights = [np.asarray(layer.weight.array, np.float32) for layer in (experts.gate_proj, experts.up_proj)]
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor(np.asarray(experts.router.weight.array)))
        gate_up = np.concatenate([weight.transpose(0, 2, 1) for weight in weights], axis=1)
        block.experts.gate_up_proj.copy_(torch.tensor(gate_up))
        down = np.asarray(experts.down_proj.weight.array, np.float32).transpose(0, 2, 1)
        block.experts.down_proj.copy_(torch.tensor(down))
        hidden = torch.tensor(x).bfloat16()
        expected, out = block.gate(hidden)[0].numpy(), block(hidden).float().numpy()
    logits, found = routed(experts, x)
    assert (logits.dtype, found.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(logits.array.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.array.astype(jnp.float32), out, rtol=0, atol=2e-2 * np.abs(out).max())
    rounded, _ = routed(experts_of(BF16), x)
    assert rounded.dtype == jnp.bfloat16
    assert np.abs(np.asarray(rounded.array, np.float32).reshape(expected.shape) - expected).max() > 1e-3


@pytest.mark.slow
def test_only_the_router_of_the_compiled_step_is_in_float32():
    """The step of a bfloat16 Mixtral: products with the 5 routes, forward and backward, against all others."""

    def products(mp) -> tuple[set[str], set[str]]:
        """The dtypes of the operands of the router's products, and of all others."""
        config = tree_of_run() | {"model": {**MODELS["mixtral"], "num_experts": 5}}
        config["trainer"]["mp"] = encode(mp) if isinstance(mp, PrecisionConfig) else mp
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for line in Outcome(config).program("step").splitlines():
            if "stablehlo.dot_general" in line:
                types = line.rpartition(" : ")[2]
                operands = re.findall(r"x(bf16|f32)>", types.partition("->")[0])
                found[re.search(r"<(\d+x)*5x", types) is not None].update(operands)
        return found[True], found[False]

    assert products(BF16) == ({"bf16"}, {"bf16"})
    assert products(FLOAT32_ROUTER) == ({"f32"}, {"bf16"})
