"""nanochat's model against a transcription in torch, its own counts, one device and a full forward pass."""

import dataclasses
import json
import re
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.interop.hf.load import load_weights
from jaxlm.interop.hf.safetensors_file import TensorInfo
from jaxlm.models.base import ModelConfig, vocab_axis
from jaxlm.models.inference.generate import GenerationConfig, generate, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.unstacked import Generator, unstack
from jaxlm.models.loss import next_token_sums
from jaxlm.models.rope import DefaultRotary
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.surgery.lora import LoraConfig
from jaxlm.systems.nanochat.model import NanoConfig, nanochat_flops_per_token, parameter_counts
from jaxlm.systems.nanochat.torch_checkpoint import weight_table
from tests.engine import helpers

COUNTS = json.loads((Path(__file__).parents[2] / "vectors" / "nanochat_counts.json").read_text())
VOCAB, LENGTH = 64, 16
SMEARS = {"smear_channels": 24, "backout": 0.2}
TINY = NanoConfig(seq_len=LENGTH, hidden_dim=32, num_layers=8, num_heads=4, num_kv_heads=2, **SMEARS)


class Arrays:
    """nanochat's tensors as a source."""

    def __init__(self, arrays):
        self._arrays = arrays
        self.tensors = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}

    def view(self, name, region=()):
        return self._arrays[name][region]

    def where(self, name):
        return name


def imported(config, arrays, vocab=VOCAB):
    abstract = jax.eval_shape(lambda: config.build(vocab_axis(vocab), key=jax.random.key(0)))
    return load_weights(abstract, weight_table(config), Arrays(arrays), helpers.one_device(), where="test")


def ids(seed=0, rows=2, length=LENGTH, vocab=40):  # the fixture `built` has 40 tokens
    return np.random.default_rng(seed).integers(0, vocab, (rows, length))


def cases():
    """Both revisions, grouped-query attention, full windows, an odd number of layers, a vocabulary that is padded."""
    from tests.systems.nanochat.nano_reference import EARLY, LATE

    changed = dataclasses.replace
    return {
        "early": EARLY,
        "late": LATE,
        "one kv head": changed(EARLY, kv_heads=1),
        "full windows": changed(EARLY, pattern="L"),
        "nine layers": changed(LATE, num_layers=9, short=5, pattern="SSL"),
        "61 tokens": changed(EARLY, vocab=61, num_layers=2),
        "one layer": changed(EARLY, num_layers=1),  # with backout, the last layer would be the middle one
    }


NAMES = ["early", "late", "one kv head", *("full windows", "nine layers", "61 tokens", "one layer")]


def loss_of(config, whole=lambda trained: trained):
    def loss(trained, inputs, targets):
        model = whole(trained)
        hidden = model.hidden(inputs).final
        mask = hax.named(jnp.where(targets < 0, 0.0, 1.0), inputs.tokens.axes)
        chosen = hax.named(jnp.maximum(targets, 0), inputs.tokens.axes)
        options = model.traits.loss_options
        sums = next_token_sums(hidden, model.lm_head(), chosen, mask, **options)
        return sums.total / mask.sum().array

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize(
    "name",
    [
        # The last layer of every case has a full window.
        *(pytest.param(n, marks=pytest.mark.soak if n == "full windows" else pytest.mark.slow) for n in NAMES),
    ],
)
def test_logits_loss_and_every_gradient_are_those_of_torch(name, as_inputs, logits_of):
    torch = pytest.importorskip("torch")
    reference = cases()[name]
    config, arrays = reference.config(), reference.weights()
    tokens = ids(vocab=reference.vocab)
    targets = np.where(ids(1, vocab=reference.vocab) < 3, -1, np.roll(tokens, -1, 1))
    weights = {key: torch.tensor(array, requires_grad=True) for key, array in arrays.items()}
    logits = reference.logits(weights, torch.tensor(tokens))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-1)
    expected.backward()
    model = imported(config, arrays, reference.vocab)
    np.testing.assert_allclose(logits_of(model, as_inputs(tokens)), logits.detach(), rtol=1e-4, atol=2e-5)
    loss, gradient = loss_of(config)(model, as_inputs(tokens), jnp.asarray(targets))
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    grads = imported(config, {key: np.asarray(weight.grad) for key, weight in weights.items()}, reference.vocab)
    for (path, ours), (_, theirs) in zip(tree.leaves(gradient), tree.leaves(grads), strict=True):
        scale = float(jnp.abs(theirs.array).max())
        assert scale > 0, path
        np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-4, atol=1e-4 * scale, err_msg=path)


@pytest.mark.parametrize("name", ["early", pytest.param("late", marks=pytest.mark.slow)])
def test_inputs_longer_than_seq_len(name, as_inputs, logits_of):
    """There, layers that attend to all previous tokens are windows of `seq_len` too, and short ones may be longer."""
    torch = pytest.importorskip("torch")
    reference = cases()[name]
    changes = {"short_window_fraction": 0.25, "short_window_multiple": 128} if name == "late" else {}
    config, arrays, tokens = reference.config(**changes), reference.weights(), ids(length=40, vocab=reference.vocab)
    assert config.window_distances == (*([128 if name == "late" else 8] * 3), LENGTH)
    expected = reference.logits({key: torch.tensor(array) for key, array in arrays.items()}, torch.tensor(tokens))
    model = imported(config, arrays, reference.vocab)
    np.testing.assert_allclose(logits_of(model, as_inputs(tokens)), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_rounded_rotations_change_the_loss(as_inputs, logits_of):
    """In the fifth digit, as nanochat's do: the option has an effect that the comparison with torch would not allow."""
    pytest.importorskip("torch")
    early = cases()["early"]
    arrays, inputs = early.weights(), as_inputs(ids())
    rounded, exact = (logits_of(imported(early.config(rope_dtype=d), arrays), inputs) for d in ("bfloat16", "float32"))
    assert 1e-4 < float(np.abs(rounded - exact).max()) < 0.1


@pytest.mark.parametrize("case", COUNTS["models"], ids=lambda case: f"{case['era']}-d{case['depth']}")
def test_counts_are_nanochats(case):
    late = {"short_window_fraction": 0.25, "short_window_multiple": 128, "value_gate_channels": 12} | SMEARS
    config = NanoConfig(
        hidden_dim=case["n_embd"],
        num_layers=case["depth"],
        num_heads=case["n_head"],
        **(late if case["era"] == "head" else {}),
    )
    counts = parameter_counts(config, COUNTS["vocab_size"])
    none = {"l3_embeds": 0, "l3_matrices": 0}
    assert dataclasses.asdict(counts) | {"total": counts.total} == case["param_counts"] | none
    assert counts.scaling == case["scaling_params"]
    assert nanochat_flops_per_token(config, COUNTS["vocab_size"]) == case["flops_per_token"]
    assert [min(back, 2048) for back in config.window_distances] == case["windows"]
    assert config.ValueLayers.size == case["n_value_embeds"]
    model = jax.eval_shape(lambda: config.build(vocab_axis(COUNTS["vocab_size"]), key=jax.random.key(0)))
    assert tree.num_parameters(model) == counts.total


def test_counts_include_the_padding_of_the_vocabulary():
    config = NanoConfig(hidden_dim=128, num_layers=2, num_heads=1)
    assert parameter_counts(config, 50257) == parameter_counts(config, 50304)
    assert parameter_counts(config, 50257).wte == 50304 * 128
    assert nanochat_flops_per_token(config, 50257) == nanochat_flops_per_token(config, 50304)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_pattern": "SXL"}, r"model\.window_pattern: 'SXL' given, a word of the letters S .* and L"),
        ({"window_pattern": ""}, r"model\.window_pattern: '' given"),
        ({"num_heads": 5}, r"model\.num_heads: 5 given, which does not divide model\.hidden_dim = 32"),
        ({"num_kv_heads": 3}, r"model\.num_kv_heads: 3 given, which does not divide model\.num_heads = 4"),
        ({"value_gate_channels": 33}, r"model\.value_gate_channels: 33 given, at most model\.hidden_dim = 32 expected"),
        ({"smear_channels": 40}, r"model\.smear_channels: 40 given, at most model\.hidden_dim = 32 expected"),
        ({"qk_scale": 0.0}, r"model\.qk_scale: 0\.0 given, a finite number above 0"),
    ],
)
def test_invalid_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes).check()


def test_windows_follow_the_pattern():
    assert ModelConfig.get_choice_class("nano") is NanoConfig
    config = NanoConfig(seq_len=2048, num_layers=6)
    assert config.window_distances == (1024, 1024, 1024, 2048, 1024, 2048)
    assert [kind.window for kind in config.kinds] == [1025, 1025, 1025, None, 1025, None]
    late = dataclasses.replace(config, short_window_fraction=0.25, short_window_multiple=128)
    assert late.window_distances[0] == 512
    assert dataclasses.replace(late, seq_len=513).window_distances[0] == 256
    assert dataclasses.replace(config, seq_len=33).window_distances[0] == 16


@pytest.mark.slow
def test_initialization():
    config = NanoConfig(
        hidden_dim=256,
        num_layers=5,
        num_heads=2,
        embed_init_std=0.8,
        mlp_init_scale=0.4,
        gate_init_max=0.02,
        first_resid_lambda=1.15,
        last_resid_lambda=1.05,
        first_x0_lambda=0.2,
        last_x0_lambda=0.05,
        **SMEARS,
    )
    model = jax.jit(lambda key: config.build(vocab_axis(1000), key=key))(jax.random.key(0))
    block, bound = model.body.layers.stacked, (3 / 256) ** 0.5
    uniform = {"q": block.attn.q_proj.weight, "v": block.attn.v_proj.weight, "values": model.body.value_embedding}
    for name, weight in uniform.items():
        assert float(jnp.abs(weight.array).max()) == pytest.approx(bound, rel=1e-3), name
        assert float(jnp.std(weight.array)) == pytest.approx(1 / 16, rel=0.02), name
    assert float(jnp.abs(block.mlp.up_proj.weight.array).max()) == pytest.approx(0.4 * bound, rel=1e-3)
    assert not any(jnp.any(part.weight.array) for part in (block.attn.o_proj, block.mlp.down_proj))
    assert float(jnp.std(model.tokens.weight.array)) == pytest.approx(0.8, rel=0.02)
    assert float(jnp.std(model.head.weight.array)) == pytest.approx(0.001, rel=0.02)
    np.testing.assert_allclose(model.body.resid_lambdas.array, [1.15 - 0.1 * i / 4 for i in range(5)], rtol=1e-6)
    np.testing.assert_allclose(model.body.x0_lambdas.array, [0.2 - 0.15 * i / 4 for i in range(5)], rtol=1e-6)
    gates = model.body.value_gates.weight.array
    assert float(gates.min()) > 0
    assert float(gates.max()) < 0.02
    assert float(gates.mean()) == pytest.approx(0.01, rel=0.1)
    assert (float(model.smear_lambda.array), float(model.backout_lambda.array)) == (0.0, pytest.approx(0.2))


def whole_and_part(as_inputs):
    """Two rows of 14 tokens, the second padded on the left, and a function that selects positions."""
    tokens, segments = ids(length=14), np.ones((2, 14), int)
    segments[1, :4] = 0
    positions = np.maximum(np.arange(14) - np.array([[0], [4]]), 0)
    whole = as_inputs(tokens, positions, segments)
    return whole, lambda of: jax.tree.map(lambda a: a["position", of], whole, is_leaf=tree.is_named)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [7, pytest.param(8, marks=pytest.mark.soak)])
def test_decoding_with_a_cache_is_the_full_forward_pass(layers, built, as_inputs):
    """Token by token after a prompt, with windows of 4 tokens, in the stacked and in the unstacked form."""
    config = dataclasses.replace(TINY, num_layers=layers, short_window_fraction=3 / 16)
    assert config.kinds[0].window == 4
    model, (whole, part) = built(config), whole_and_part(as_inputs)
    step = jax.jit(lambda model, inputs, cache: model.hidden(inputs, cache=cache))
    expected = step(model, whole, None).final
    empty = model.init_cache(Axis("batch", 2), 16, jnp.float32)
    prompt = step(model, part(slice(0, 8)), empty)
    np.testing.assert_allclose(prompt.final["position", 5:8].array, expected["position", 5:8].array, atol=2e-5)
    unstacked, apart = unstack((model, prompt.cache))
    stacked = prompt.cache
    for at in range(8, 14):
        one = part(slice(at, at + 1))
        for form, cache in ((model, stacked), (unstacked, apart)):
            found = step(form, one, cache)
            later = expected["position", at : at + 1].array
            np.testing.assert_allclose(found.final.array, later, rtol=2e-5, atol=2e-5)
            stacked, apart = (found.cache, apart) if form is model else (stacked, found.cache)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_generation_with_other_caches_and_a_prefix_cache(dtype, built):
    model = built(dataclasses.replace(TINY, seq_len=512))
    decoding, cache, writer = (
        GenerationConfig(8, temperature=0.0, cache_dtype=dtype),
        PrefixCache(),
        Generator.of(model),
    )
    prompt, anew = ids(3, 1, 70)[0].tolist(), []
    for _ in range(3):
        pieces = list(stream_tokens(writer, [prompt], decoding, every=8, prefix_cache=cache))
        anew.append([token for (piece,) in pieces for token in piece])
        fresh = list(stream_tokens(writer, [prompt], decoding, every=8))
        assert anew[-1] == [token for (piece,) in fresh for token in piece]
        prompt = [*prompt, *anew[-1], 5, 6, 7]


@pytest.mark.slow
def test_greedy_generation_is_the_argmax_of_full_forward_passes(built, as_inputs, logits_of):
    config = dataclasses.replace(TINY, short_window_fraction=3 / 16)
    model, prompts = built(config), [[1, 2, 3], [4]]
    for prompt, new in zip(prompts, generate(model, prompts, max_new_tokens=6, temperature=0.0), strict=True):
        text = np.array([[*prompt, *new]])
        following = np.asarray(logits_of(model, as_inputs(np.pad(text, ((0, 0), (0, LENGTH - text.size)))))).argmax(-1)
        assert following[0, len(prompt) - 1 : text.size - 1].tolist() == new


@pytest.mark.slow
def test_documents_in_one_row_do_not_see_each_other(built, as_inputs, logits_of):
    """Neither attention nor smear crosses from one to the next."""
    model, tokens = built(TINY), ids(5, 1)
    segments, positions = np.repeat([[1, 2]], [9, 7], 1), np.array([[*range(9), *range(7)]])
    packed = logits_of(model, as_inputs(tokens, positions, segments))
    for of in (slice(0, 9), slice(9, 16)):
        alone = np.pad(tokens[:, of], ((0, 0), (0, LENGTH - tokens[:, of].shape[1])))
        expected = logits_of(model, as_inputs(alone))[:, : tokens[:, of].shape[1]]
        np.testing.assert_allclose(packed[:, of], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_taps(built, as_inputs):
    """Each is the output of the layers below it; asking for some does not change the others."""
    model, inputs = built(dataclasses.replace(TINY, num_layers=5)), as_inputs(ids())
    run = jax.jit(lambda taps: model.hidden(inputs, taps=taps), static_argnums=0)
    names = ("embedding", *(f"layer_{i}" for i in range(5)), "final")
    every, few, none = run(names), run(("layer_1", "final")), run(())
    np.testing.assert_allclose(every.final.array, none.final.array, rtol=1e-5, atol=1e-5)
    for name in ("layer_1", "final"):
        np.testing.assert_allclose(few.taps[name].array, every.taps[name].array, rtol=1e-5, atol=1e-5)
    assert every.taps.keys() == set(names)
    last = every.taps["layer_4"] - model.backout_lambda * every.taps["layer_2"]
    normalized = last.array / np.sqrt(np.mean(np.square(last.array), -1, keepdims=True) + 1.1920929e-7)
    np.testing.assert_allclose(every.final.array, normalized, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"taps: 'layer_5' given"):
        model.hidden(inputs, taps=("layer_5",))


@pytest.mark.slow
def test_adapters_of_lora_with_dropout_reach_the_gates_of_value_embeddings(built, as_inputs):
    lora = LoraConfig(target=r"value_gates|q_proj", rank=2, dropout=0.5)
    model = lora.apply(built(TINY), key=jax.random.key(1))
    model = tree.map_leaves(lambda path, leaf: leaf + 0.3 if path.endswith((".a", ".b")) else leaf, model)
    inputs = as_inputs(ids())
    hidden = jax.jit(lambda model, key=None: model.hidden(inputs, key=key).final.array)
    plain = hidden(model)
    assert np.abs(plain - hidden(lora.merge(model))).max() < 2e-5
    dropped = [hidden(model, jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert np.abs(dropped[0] - dropped[2]).max() > 1e-3


def program(config, as_inputs):
    model = jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))
    return jax.jit(lambda model, inputs: model.hidden(inputs).final).lower(model, as_inputs(ids())).as_text()


@pytest.mark.slow
def test_what_is_compiled_does_not_grow_with_the_number_of_layers(as_inputs):
    """One period of four layers in the scan's body, and the layers after the last whole period."""
    config = dataclasses.replace(TINY, scan_layers=True)
    texts = [program(dataclasses.replace(config, num_layers=layers), as_inputs) for layers in (8, 24, 10, 26)]
    counts = [len(re.findall("stablehlo.dot_general", text)) for text in texts]
    whole, rest = counts[:2], counts[2:]
    assert whole[0] == whole[1]
    assert rest[0] == rest[1]
    assert whole[0] < rest[0] < 2 * whole[0]


def test_no_layer_branches(as_inputs):
    """XLA for GPUs gathers what a branch returns from all devices."""
    config = dataclasses.replace(TINY, scan_layers=True)
    assert config.backout is not None
    assert not re.search(r"stablehlo\.(case|if)\b", program(config, as_inputs))


@pytest.mark.slow
def test_scan_and_unrolled_layers_are_equal(built, as_inputs):
    inputs, found = as_inputs(ids()), []
    for scan in (True, False):  # three periods of two layers
        model = built(dataclasses.replace(TINY, num_layers=6, window_pattern="SL", scan_layers=scan))
        found.append(jax.jit(jax.grad(lambda m: (m.hidden(inputs).final ** 3).sum().array))(model))
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(jnp.abs(theirs).max()))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "cheap", pytest.param("full", marks=pytest.mark.soak)])
def test_no_second_copy_of_the_parameters_is_saved(remat, as_inputs):
    """The backward pass selects each layer's parameters again. What it needs of the activations is small here."""
    config = NanoConfig(
        seq_len=LENGTH, hidden_dim=128, num_layers=16, num_heads=4, gradient_checkpointing=remat, scan_layers=True
    )
    model = jax.eval_shape(lambda: config.build(vocab_axis(256), key=jax.random.key(0)))
    inputs = as_inputs(ids(rows=1))
    compiled = jax.jit(jax.grad(lambda m: m.hidden(inputs).final.sum().array)).lower(model).compile()
    size = 4 * tree.num_parameters(model)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["late", pytest.param("early", marks=pytest.mark.soak)])
def test_twenty_steps_are_those_of_torch(name):
    """The loss of each step in float32, with Adam on both sides; the run's losses are those of its training step."""
    torch = pytest.importorskip("torch")
    reference = dataclasses.replace(cases()[name], length=LENGTH)
    config, start = reference.config(), reference.weights()
    adam = AdamConfig(learning_rate=3e-3, beta2=0.95, lr_schedule="constant", warmup=0, max_grad_norm=None)
    run = helpers.TinyRun(helpers.one_device(), helpers.phase(optimizer=adam), model=config)
    run.state = dataclasses.replace(run.state, model=imported(config, start))
    weights = {key: torch.tensor(array, dtype=torch.float32, requires_grad=True) for key, array in start.items()}
    theirs, losses = torch.optim.Adam(weights.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8), []
    for step in range(20):
        columns = helpers.arrays(step)
        tokens, targets, mask = (torch.tensor(columns[key]) for key in ("tokens", "targets", "loss_mask"))
        logits = reference.logits(weights, tokens.long())
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none")
        loss = (nats * mask).sum() / mask.sum()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        losses.append((run.step(columns)["train/loss"], loss.item()))
    ours, expected = np.transpose(losses)
    np.testing.assert_allclose(ours, expected, rtol=1e-3)
    assert expected[-1] < 0.8 * expected[0]


EIGHT = dataclasses.replace(TINY, hidden_dim=64, num_layers=4, window_pattern="SL")
LAYOUTS = {"tp 2 x fsdp 4": {"model": 2}, "fsdp 8": {}}


def layout_of(config, shape):
    built = jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))
    sizes = {axis.name: axis.size for _, leaf in tree.leaves(built) for axis in leaf.axes}
    tensor = ("mlp", "heads") if shape else ()
    return make_layout(mesh_shape(8, **shape), AxisMappings("batch", ("embed",), tensor, {}, {}), sizes)


def with_random_weights(run):
    """From the initial weights, the gradient of the factors is rounding alone: norms do not see the scale of x."""
    rng = np.random.default_rng(0)
    random = lambda a: jax.device_put(rng.normal(0.2, 0.2, a.shape).astype(np.float32), a.sharding)  # noqa: E731
    run.state = dataclasses.replace(run.state, model=jax.tree.map(random, run.state.model))
    return run


# Sharding by FSDP alone is a part of the other layout.
@pytest.mark.parametrize(
    "name", [pytest.param("tp 2 x fsdp 4", marks=pytest.mark.slow), pytest.param("fsdp 8", marks=pytest.mark.soak)]
)
def test_training_on_eight_devices_is_the_training_of_one(name):
    places = (helpers.one_device(), layout_of(EIGHT, LAYOUTS[name]))
    runs = [with_random_weights(helpers.TinyRun(place, model=EIGHT)) for place in places]
    for step in range(3):
        found = [run.step(helpers.arrays(step)) for run in runs]
        for metric in ("train/loss", "grad/norm/total"):
            assert found[1][metric] == pytest.approx(found[0][metric], rel=2e-5), (step, metric)
    table = runs[1].state.model.body.value_embedding
    shard = table.array.addressable_shards[0].data
    assert shard.size * (4 if LAYOUTS[name] else 8) == table.array.size  # FSDP shards it, though it has no axis `embed`
    for (path, ours), (_, theirs) in zip(*(tree.leaves(run.state.model) for run in runs), strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, rtol=1e-3, atol=1e-4, err_msg=path)


def test_the_rope_section_is_read():
    with pytest.raises(ConfigError, match=r"model\.num_heads: 32 heads have 1 features"):
        dataclasses.replace(TINY, num_heads=32, num_kv_heads=None).check()
    assert dataclasses.replace(TINY, rope=DefaultRotary(theta=1e5)).kinds[0].rope.theta == 1e5
