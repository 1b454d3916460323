"""How adapters start, against PEFT: PiSSA and OLoRA from the weights, EVA from the inputs of the layers."""

import functools
import json
from dataclasses import replace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.axes import LAYERS, LORA, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.precision import Precision
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.engine.entry import StateBuilder, enter_phase
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.models.layers import GatedMlp
from jaxlm.models.linear import Linear
from jaxlm.session.load_model import open_model
from jaxlm.surgery.input_moments import input_moments
from jaxlm.surgery.lora import LoraConfig, save_peft
from jaxlm.surgery.lora_layers import LoraLinear, principal_components
from tests.answers import write_model
from tests.engine.helpers import MODEL, VOCAB, arrays, batch, layout, one_device, phase
from tests.surgery.test_peft import logits_of
from tests.tiers import one_of

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGET = "attn|mlp"
F32 = Precision(jnp.dtype(jnp.float32), jnp.dtype(jnp.float32))
# Name -> keys of PEFT's LoraConfig, keys of ours.
CASES = {
    "pissa": ({"init_lora_weights": "pissa"}, {"init": "pissa"}),
    "olora": ({"init_lora_weights": "olora"}, {"init": "olora"}),
    "pissa, dora": ({"init_lora_weights": "pissa", "use_dora": True}, {"init": "pissa", "use_dora": True}),
    "pissa, ranks": (
        {
            "init_lora_weights": "pissa",
            "rank_pattern": {r"layers\.1\.mlp\.up_proj": 7, "q_proj": 2},
            "alpha_pattern": {r"layers\.0\.self_attn\.v_proj": 3},
        },
        {
            "init": "pissa",
            "rank_pattern": {r"layers\.1\.mlp\.up_proj": 7, "q_proj": 2},
            "alpha_pattern": {r"layers\.0\.attn\.v_proj": 3.0},
        },
    ),
    "olora, layers": (
        {"init_lora_weights": "olora", "layers_to_transform": [1], "layers_pattern": "layers", "use_rslora": True},
        {"init": "olora", "layers_to_transform": [1], "rslora": True},
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a tiny Llama, what opened it, and its model."""
    pytest.importorskip("peft")
    from safetensors.numpy import load_file, save_file

    folder = write_model(tmp_path_factory.mktemp("base") / "hf")
    weights = load_file(folder / "model.safetensors")
    separated = {name: separate_singular_values(w) if w.ndim == 2 else w for name, w in weights.items()}
    save_file(separated, folder / "model.safetensors", {"format": "pt"})
    named = open_model(str(folder), {})
    with named.plan.layout.use():
        return folder, named, named.load()


def separate_singular_values(weight: np.ndarray) -> np.ndarray:
    """The matrix with other singular values: vectors of values that are close depend on how a processor rounds."""
    u, values, v = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
    return ((u * values[0] * 0.8 ** np.arange(len(values))) @ v).astype(np.float32)


def in_peft(folder, **keys):
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    keys = {"r": 4, "lora_alpha": 6, "target_modules": ALL, "task_type": "CAUSAL_LM", **keys}
    return peft.get_peft_model(model, peft.LoraConfig(**keys)).eval()


def by_layer(layer: LoraLinear) -> list[dict[str, np.ndarray]]:
    """The matrices of each layer, without what is beyond its rank."""
    inputs, outputs = (tuple(axis.name for axis in axes_of(spec)) for spec in (layer.In, layer.Out))
    orders = {
        "lora_A": (layer.a, (LORA, *inputs), 1),
        "lora_B": (layer.b, (*outputs, LORA), len(outputs)),
        "base_layer": (layer.base.weight, (*outputs, *inputs), len(outputs)),
    }
    if layer.magnitude is not None:
        orders["lora_magnitude_vector"] = (layer.magnitude, outputs, len(outputs))
    found = []
    for number in range(layer.a.axis_size(LAYERS)):
        rank = layer.sizes[number].rank if layer.sizes else layer.a.axis_size(LORA)
        arrays = {}
        for name, (array, order, rows) in orders.items():
            own = np.asarray(array[LAYERS, number].rearrange(order).array)
            arrays[name] = own.reshape(int(np.prod(own.shape[:rows])), -1)
        arrays["lora_A"], arrays["lora_B"] = arrays["lora_A"][:rank], arrays["lora_B"][:, :rank]
        found.append(arrays)
    return found


def module_of(path: str, number: int) -> str:
    part = path.removeprefix("body.layers.stacked.").replace("attn", "self_attn")
    return f"base_model.model.model.layers.{number}.{part}"


def rows_with_signs(a: np.ndarray) -> np.ndarray:
    return np.sign(a[np.arange(len(a)), np.abs(a).argmax(axis=1)])


# The others divide by one rank and one scale too.
SIMPLE = ("pissa", "olora")


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SIMPLE else ()) for c in CASES])
def test_the_weights_are_divided_as_in_peft(base, case):
    folder, named, plain = base
    theirs, ours = CASES[case]
    expected = dict(in_peft(folder, **theirs).named_parameters())
    surgery = LoraConfig(target=TARGET, rank=4, alpha=6.0, **ours)
    with named.plan.layout.use():
        model = jax.jit(lambda model: surgery.apply(model, key=jax.random.key(0)))(plain)
        ids = np.arange(48).reshape(2, 24)
        np.testing.assert_allclose(logits_of(model, ids), logits_of(plain, ids), rtol=1e-5, atol=1e-5)
    compared = 0
    for path, layer in tree.modules_by_path(model, LoraLinear):
        for number, matrices in enumerate(by_layer(layer)):
            module = module_of(path, number)
            if f"{module}.lora_A.default.weight" not in expected:
                assert not matrices["lora_A"].size
                continue
            found = {
                name: expected[f"{module}.{name}{'.default' if 'lora' in name else ''}.weight"].detach().numpy()
                for name in matrices
            }
            signs = rows_with_signs(found["lora_A"]) * rows_with_signs(matrices["lora_A"])
            matrices["lora_A"], matrices["lora_B"] = matrices["lora_A"] * signs[:, None], matrices["lora_B"] * signs
            assert (rows_with_signs(matrices["lora_A"] * signs[:, None]) > 0).all()
            for name, array in matrices.items():
                theirs_array = found[name].reshape(array.shape)
                np.testing.assert_allclose(array, theirs_array, rtol=1e-5, atol=1e-5, err_msg=f"{module} {name}")
                compared += 1
    assert compared == 3 * sum("lora_A" in name for name in expected) + sum("magnitude" in name for name in expected)


@pytest.mark.slow
def test_bfloat16_weights_are_divided_in_float32(base):
    _, named, plain = base
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), plain)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    surgery = LoraConfig(target="q_proj", rank=4, init="pissa")
    with named.plan.layout.use():
        ours, exact = (
            surgery.apply(model, key=jax.random.key(0)).body.layers.stacked.attn.q_proj for model in (half, wide)
        )
    assert ours.base.weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.a.array, exact.a.array)
    np.testing.assert_array_equal(ours.base.weight.array, exact.base.weight.astype(jnp.bfloat16).array)


@pytest.mark.slow
@pytest.mark.parametrize("case", one_of(reversed(CASES), but=2))
def test_exported_adapters_are_for_the_unchanged_base(base, tmp_path, case):
    """Trained, merged, and written as adapters that PEFT adds to the base: the same logits."""
    import peft
    import torch
    import transformers

    folder, named, plain = base
    surgery = LoraConfig(target=TARGET, rank=4, alpha=6.0, **CASES[case][1])

    def trained(path, leaf):
        moves = path.endswith((".a", ".b", ".magnitude"))
        return leaf * (1 + 0.3 * hax.random.normal(jax.random.key(len(path)), leaf.axes)) if moves else leaf

    ids = np.arange(48).reshape(2, 24)
    with named.plan.layout.use():
        model = tree.map_leaves(trained, surgery.apply(plain, key=jax.random.key(0)))
        ours = logits_of(model, ids)
        np.testing.assert_allclose(logits_of(surgery.merge(model), ids), ours, rtol=1e-4, atol=1e-4)
        assert np.abs(ours - logits_of(plain, ids)).max() > 0.1
        save_peft(tmp_path / "out", model, named.plan.config.model, named.plan.layout, dtype=np.float32, base="base")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(loaded, tmp_path / "out").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    if case == "pissa":
        assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 8
    again = open_model(str(folder), {}, adapter=str(tmp_path / "out"))
    with again.plan.layout.use():
        np.testing.assert_allclose(logits_of(again.load(), ids), ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"init": "pissa", "rank": 100}, r"rank 100, and its matrix 32 x 32 gives at most 32"),
        ({"init": "eva", "rank": 100}, r"rank 100, and its matrix 32 x 32 gives at most 32"),
        ({"init": "pissa", "alpha": 0.0}, "divides by alpha, which is 0"),
        (
            {"init": "eva", "embeddings": "tokens"},
            "init: eva given together with embeddings: tokens, whose tables start",
        ),
        (
            {"init": "olora", "from_peft": "x"},
            "init: olora given together with from_peft: x, whose adapters have started",
        ),
        ({"calibration_batches": 2}, "calibration_batches: 2 given without init: eva, but init is default"),
        ({"existing": "keep", "embeddings": "tokens"}, "embeddings: tokens given together with existing: keep"),
        ({"existing": "merge", "init": "eva"}, "existing: merge given together with init: eva, which measures layers"),
    ],
    ids=str,
)
def test_contradictions_are_refused(keys, message):
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32)
    surgery = LoraConfig(**{"target": "q_proj", **keys})

    def apply(model):
        check_fields(surgery)
        return surgery.apply(model, key=jax.random.key(0))

    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(apply, builder.abstract_initial_model)


# --- EVA --------------------------------------------------------------------------------------------------------------


def padded_batch(ids: np.ndarray, lengths: list[int]) -> TokenBatch:
    """Rows of these lengths; the rest of them is padding."""
    axes = (hax.Axis("batch", ids.shape[0]), hax.Axis("position", ids.shape[1]))
    present = np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    columns = {"tokens": ids, "targets": ids, "loss_mask": present.astype(np.float32), "segment_ids": present}
    columns |= {"positions": positions}
    return TokenBatch(
        **{
            name: hax.named(jnp.asarray(c, jnp.float32 if name == "loss_mask" else jnp.int32), axes)
            for name, c in columns.items()
        }
    )


def angles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sines of the principal angles between the spaces of rows."""
    ours, theirs = (np.linalg.qr(rows.T.astype(np.float64))[0] for rows in (a, b))
    return np.linalg.svd(ours - theirs @ (theirs.T @ ours), compute_uv=False)


LENGTHS = [24, 10, 17, 24, 3, 20, 24, 11]


def eva_in_peft(folder, ids, *, exact: bool, monkeypatch):
    """PEFT's EVA on one batch. Args: exact: with a whole SVD instead of a random projection."""
    import peft.tuners.lora.eva as eva
    import torch

    if exact:
        original = eva.IncrementalPCA
        monkeypatch.setattr(eva, "IncrementalPCA", lambda n_components, **_: original(n_components=n_components))
    mask = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    model = in_peft(folder, init_lora_weights="eva", eva_config=__import__("peft").EvaConfig(rho=1.0))
    explained = {}
    rank_distribution = eva.SVDHook.__call__

    def kept(hook, *arguments):
        rank_distribution(hook, *arguments)
        explained[hook.name] = hook.svd.explained_variance_ratio_.numpy()

    monkeypatch.setattr(eva.SVDHook, "__call__", kept)
    loader = [{"input_ids": torch.tensor(ids), "attention_mask": mask.long()}]
    eva.initialize_lora_eva_weights(model, loader, show_progress_bar=False)
    return dict(model.named_parameters()), explained


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False], ids=["whole SVD", "as released"])
def test_eva_finds_the_subspaces_that_peft_finds(base, monkeypatch, exact):
    folder, named, plain = base
    ids = np.random.default_rng(0).integers(1, 60, (8, 24))
    theirs, explained = eva_in_peft(folder, ids, exact=exact, monkeypatch=monkeypatch)
    surgery = LoraConfig(target=TARGET, rank=4, alpha=6.0, init="eva")
    with named.plan.layout.use():
        sums = jax.jit(surgery.measure)(plain, padded_batch(ids, LENGTHS))
        model = surgery.apply(plain, key=jax.random.key(0))
        model = surgery.fill(model, plain, refs={}, sums=sums, key=jax.random.key(1))
        np.testing.assert_allclose(logits_of(model, ids), logits_of(plain, ids), rtol=1e-6, atol=1e-6)
    worst, compared, ratios, least = 0.0, 0, 0.0, 1.0
    for path, layer in tree.modules_by_path(model, LoraLinear):
        assert not layer.b.array.any()
        shares = np.asarray(principal_components(sums[path], 4)[1])
        for number, found in enumerate(by_layer(layer)):
            module = module_of(path, number)
            expected = theirs[f"{module}.lora_A.default.weight"].detach().numpy()
            worst = max(worst, angles(found["lora_A"], expected).max())
            captured = [np.trace(a @ covariance(sums[path], number) @ a.T) for a in (expected, found["lora_A"])]
            least = min(least, captured[0] / captured[1])
            compared += 1
            if module in explained:
                ratios = max(ratios, np.abs(shares[number] - explained[module]).max())
            if exact:
                np.testing.assert_allclose(found["lora_A"], expected, rtol=1e-3, atol=1e-3, err_msg=module)
    assert compared == 14
    print(f"largest sine {worst:.1e}, largest difference of shares {ratios:.1e}, PEFT captures at least {least:.6f}")
    # The random projection of the released code loses a part of the variance; nothing captures more than the components.
    assert least < 1 + 1e-5
    assert least > (1 - 1e-5 if exact else 0.98)
    assert ratios < (1e-5 if exact else 0.02)
    if exact:
        assert worst < 1e-4


def covariance(moments, number: int) -> np.ndarray:
    total, products = (np.asarray(leaf.array[number], np.float64) for leaf in (moments.total, moments.products))
    count, total = float(moments.count.array[number]), total.reshape(-1)
    return products.reshape(total.size, total.size) / count - np.outer(total, total) / count**2


@functools.lru_cache
def tiny():
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32)
    return jax.jit(builder.initial_model)()


@jax.jit
def moments_of(model, tokens: TokenBatch):
    paths = [path for path, _ in tree.modules_by_path(model, Linear) if path == "head" or "attn" in path]
    return input_moments(model, paths, Inputs(tokens.tokens, tokens.positions, tokens.segment_ids))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"scan_layers": False}], ids=str)
def test_moments_of_known_inputs(options):
    """The inputs of the first layer's projections are its normed embeddings, those of the head the final states."""
    config = replace(MODEL, **options)
    model = jax.jit(StateBuilder(config, vocab_axis(VOCAB), 0, F32).initial_model)()
    ids = np.random.default_rng(0).integers(0, VOCAB, (4, 16))
    lengths = [16, 5, 9, 1]
    tokens = padded_batch(ids, lengths)
    sums = moments_of(model, tokens)
    present = np.arange(16) < np.asarray(lengths)[:, None]
    rows = np.asarray(model.tokens.weight.array, np.float64)[ids[present]]
    normed = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)
    final = model.hidden(Inputs(tokens.tokens, tokens.positions, tokens.segment_ids)).final
    states = np.asarray(final.rearrange(("batch", "position", "embed")).array, np.float64)[present]
    for path, inputs, layer in [
        *((f"body.layers.stacked.attn.{name}", normed, 0) for name in ("q_proj", "k_proj", "v_proj")),
        ("head", states, None),
    ]:
        found = jax.tree.map(lambda x, n=layer: np.asarray(x if n is None else x[n]), sums[path])
        assert found.count.array == sum(lengths)
        np.testing.assert_allclose(found.total.array, inputs.sum(0), rtol=1e-5, atol=1e-4, err_msg=path)
        np.testing.assert_allclose(found.products.array, inputs.T @ inputs, rtol=1e-5, atol=1e-4, err_msg=path)
    assert {float(count) for each in sums.values() for count in np.ravel(each.count.array)} == {sum(lengths)}


@pytest.mark.slow
def test_padding_does_not_count():
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 16))
    others = np.where(np.arange(16) < np.asarray([16, 5])[:, None], ids, (ids + 7) % VOCAB)
    some, same = (moments_of(tiny(), padded_batch(each, [16, 5])) for each in (ids, others))
    whole = moments_of(tiny(), padded_batch(ids, [16, 16]))
    for path in some:
        for a, b, c in zip(*map(jax.tree.leaves, (some[path], same[path], whole[path])), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=path)
            assert np.abs(a - c).max() > 1e-3, path


SOME = "q_proj|o_proj|up_proj"


def entered(where, num_microbatches: int, num_batches: int = 3, **keys):
    """The model at the start of a phase with EVA, on these batches."""
    surgery = LoraConfig(target=SOME, rank=4, init="eva", calibration_batches=num_batches, **keys)
    first = phase(surgeries=(surgery,), trainable=(r"\.[ab]$",))
    builder = StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first,))

    class Batches:
        seed = 0
        closed = False

        def __next__(self):
            Batches.seed += 1
            return batch(arrays(Batches.seed), where, num_microbatches)

        def close(self):
            Batches.closed = True

    with where.use():
        state = enter_phase(builder, first, where, None, open_batches=Batches)()
    assert Batches.seed == num_batches, "it reads no more batches than it needs"
    assert Batches.closed
    return jax.device_get(state.model)


def products_of(model) -> dict[str, np.ndarray]:
    """A^T A of every adapter: the projections on what they see. Their signs do not matter."""
    found = {}
    for path, layer in tree.modules_by_path(model, LoraLinear):
        found |= {(path, number): each["lora_A"].T @ each["lora_A"] for number, each in enumerate(by_layer(layer))}
    return found


@functools.lru_cache
def entered_on_one_device():
    return entered(one_device(), 1)


@pytest.mark.slow
def test_calibration_is_the_same_on_eight_devices_with_microbatches():
    expected = products_of(entered_on_one_device())
    for key, found in products_of(entered(layout(), 2)).items():
        np.testing.assert_allclose(found, expected[key], rtol=1e-4, atol=1e-4, err_msg=str(key))


@pytest.mark.slow
def test_the_ranks_of_eva_may_differ():
    model = entered(one_device(), 1, rank_pattern={r"layers\.1\..*up_proj": 2}, layers_to_transform=[1])
    whole = entered_on_one_device()
    ranks = {}
    for (path, layer), (_, other) in zip(
        *(tree.modules_by_path(each, LoraLinear) for each in (model, whole)), strict=True
    ):
        (none, own), (_, all_of) = by_layer(layer), by_layer(other)
        assert none["lora_A"].size == 0
        np.testing.assert_allclose(own["lora_A"], all_of["lora_A"][: len(own["lora_A"])], rtol=1e-5, atol=1e-5)
        ranks[path.rpartition(".")[2]] = len(own["lora_A"])
    assert ranks == {"q_proj": 4, "o_proj": 4, "up_proj": 2}


@pytest.mark.slow
@pytest.mark.parametrize("init", one_of(["pissa", "olora"]))
def test_sharded_weights_are_divided_as_on_one_device(init):
    first = phase(surgeries=(LoraConfig(target=SOME, rank=4, init=init),), trainable=(r"\.[ab]$",))
    states = []
    for where in (one_device(), layout()):
        with where.use():
            states.append(enter_phase(StateBuilder(MODEL, vocab_axis(VOCAB), 0, F32, (first,)), first, where, None)())
    ones, eights = (tree.leaves(jax.device_get(state.model)) for state in states)
    for (path, one), (_, eight) in zip(ones, eights, strict=True):
        if not path.endswith(("initial_a", "initial_b")):
            np.testing.assert_allclose(eight.array, one.array, rtol=1e-4, atol=1e-5, err_msg=path)
    frozen = [path for path, leaf in ones if not tree.is_inexact(leaf)]
    assert frozen
    assert all(path.endswith(("initial_a", "initial_b")) for path in frozen)


@pytest.mark.slow
def test_experts_have_no_adapters_and_the_router_is_measured():
    config = MixtralConfig(
        seq_len=16, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, num_experts=4
    )
    model = jax.jit(StateBuilder(config, vocab_axis(VOCAB), 0, F32).initial_model)()
    surgery = LoraConfig(target="mlp", init="eva", rank=2)
    tokens = padded_batch(np.arange(32).reshape(2, 16), [16, 9])
    (moments,) = jax.jit(surgery.measure)(model, tokens).values()
    np.testing.assert_array_equal(moments.count.array, [25, 25])


def test_layers_that_cannot_be_measured_are_refused(monkeypatch):
    surgery = LoraConfig(target="down_proj", init="eva", rank=2)
    tokens = padded_batch(np.zeros((2, 16), np.int32), [16, 16])
    with monkeypatch.context() as patch:
        patch.setattr(GatedMlp, "__call__", lambda self, x: x)
        with pytest.raises(
            ConfigError, match=r"init: eva: target: .*mlp\.down_proj: the model does not call this layer"
        ):
            jax.eval_shape(surgery.measure, tiny(), tokens)
    with monkeypatch.context() as patch:
        flat = lambda self, x: self.down_proj(self.up_proj(x).flatten_axes(("batch", "position"), "token"))  # noqa: E731
        patch.setattr(GatedMlp, "__call__", lambda self, x: flat(self, x).unflatten_axis("token", x.axes[:2]))
        with pytest.raises(ConfigError, match="its inputs have the axes token, mlp, so it is unknown which of them"):
            jax.eval_shape(surgery.measure, tiny(), tokens)
