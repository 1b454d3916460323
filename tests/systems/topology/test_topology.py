"""Models whose layers are written in the YAML: what they compute, their sizes, and what is refused."""

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.base import Inputs, ModelConfig, layer_tap, vocab_axis
from jaxlm.models.decoder import DecoderBlock
from jaxlm.models.inference.generate import generate
from jaxlm.reading.decode import decode, encode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.lora import LoraConfig
from jaxlm.systems.progressive.surgery import SplitAtConfig
from jaxlm.systems.topology.model import TopologyConfig
from jaxlm.systems.upcycle.dba import DbaConfig
from tests.engine.helpers import MESHES, TinyRun, arrays, layout, one_device, phase
from tests.tiers import one_of

VOCAB = vocab_axis(50)
SIZES = {"seq_len": 32, "hidden_dim": 32, "initializer_range": 0.2}


@dataclass(frozen=True)
class Sections:
    model: ModelConfig


def topology(text: str, **keys: Any) -> TopologyConfig:
    """The config with the topology that the YAML describes."""
    model = {"type": "topology", **SIZES, "topology": yaml.safe_load(text), **keys}
    config = decode(Sections, ConfigSource({"model": model})).model
    assert isinstance(config, TopologyConfig)
    return config


LLAMA = """
type: stacked
layers:
  - type: nested
    repeat: 3
    layers:
      - {type: residual, layers: [{type: rms_norm}, {type: attention, num_heads: 4, num_kv_heads: 2}]}
      - {type: residual, layers: [{type: rms_norm}, {type: swiglu, intermediate_dim: 48}]}
  - {type: rms_norm}
"""
ALTERNATING = """
type: stacked
layers:
  - type: nested
    repeat: 2
    layers:
      - {type: residual, layers: [{type: rms_norm}, {type: attention, num_heads: 4, sliding_window: 5}]}
      - {type: residual, layers: [{type: layer_norm}, {type: glu, intermediate_dim: 40}]}
      - {type: residual, layers: [{type: rms_norm}, {type: attention, num_heads: 2, num_kv_heads: 1, head_dim: 24}]}
      - {type: residual, layers: [{type: rms_norm}, {type: linear, output_dim: 64}, {type: linear, output_dim: 32}]}
  - {type: rms_norm}
"""
MIXED = """
type: stacked
layers:
  - type: nested
    repeat: 2
    layers:
      - type: residual
        layers:
          - {type: rms_norm}
          - {type: attention, mode: decoupled, num_heads: 4, num_kv_heads: 2, sem_dim: 16, geo_dim: 24, gate: dynamic,
             num_key_heads: 1, null_slot: true, sliding_window: 6, bias: true, rope: {theta: 100.0}}
      - {type: residual, layers: [{type: rms_norm}, {type: moe, intermediate_dim: 24, num_experts: 4}]}
  - type: residual
    layers: [{type: layer_norm}, {type: attention, mode: standard, num_heads: 2, rope: null, output_bias: true}]
  - {type: layer_norm, weight: false, bias: false}
  - {type: residual, layers: [{type: rms_norm, weight: false}, {type: mlp, intermediate_dim: 40}]}
"""
CASES = {"llama": LLAMA, "alternating": ALTERNATING, "mixed": MIXED}


def slow_but(quick: str) -> list:
    """The cases, of which only one is quick. Llama's is compared with the family itself, and is left to the soak tests."""
    slow = {name: pytest.mark.soak if name == "llama" else pytest.mark.slow for name in CASES}
    return [pytest.param(text, id=name, marks=() if name == quick else slow[name]) for name, text in CASES.items()]


# The mixed text has units that repeat, kinds of attention that alternate, experts, and layers outside of a unit.
ONE_TEXT = pytest.mark.parametrize("text", one_of([MIXED, ALTERNATING, LLAMA]), ids=["mixed", "alternating", "llama"])


def built(config: ModelConfig, seed: int = 0) -> Any:
    """A model with random biases, norms, gates and slots too."""
    rng = np.random.default_rng(seed)

    def drawn(path: str, leaf: Any) -> Any:
        if path.endswith("pairs"):
            return leaf
        if any(part in path for part in ("gate.", "null_slot", "bias", "norm")):
            return hax.named(jnp.asarray(rng.normal(1.0, 0.3, leaf.array.shape), jnp.float32), leaf.axes)
        return leaf

    return tree.map_leaves(drawn, jax.jit(lambda key: config.build(VOCAB, key=key))(jax.random.key(seed)))


def inputs(length: int = 16, positions=None, segments=None) -> Inputs:
    axes = (hax.Axis("batch", 2), hax.Axis("position", length))
    ids = np.random.default_rng(1).integers(0, VOCAB.size, (2, length))
    positions = np.tile(np.arange(length), (2, 1)) if positions is None else positions
    segments = np.ones_like(ids) if segments is None else segments
    return Inputs(*(hax.named(jnp.asarray(a, jnp.int32), axes) for a in (ids, positions, segments)))


@jax.jit
def logits(model, read):
    return model.logits(model.hidden(read).final).rearrange(("batch", "position", "vocab")).array


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Norms, queries and outputs, keys and values, three matrices; embedding, head and last norm.
        (LLAMA, 3 * (2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 2 * 50 * 32 + 32),
        (
            ALTERNATING,
            2 * (32 + 4 * 32 * 32 + 2 * 32 + 3 * 32 * 40)
            + 2 * (32 + 2 * 32 * 48 + 2 * 32 * 24 + 32 + 2 * 32 * 64)
            + 2 * 50 * 32
            + 32,
        ),
        (
            MIXED,
            # Decoupled: 4 + 1 heads of 4 and 6 features, 2 heads of 8 values, output, gates, slots, biases.
            2 * (32 + 33 * (5 * 10 + 2 * 8) + 33 * 32 + (4 + 4 * 32) + (10 + 2 * 8))
            + 2 * (32 + 4 * 32 + 4 * 3 * 32 * 24)
            + (2 * 32 + 4 * 32 * 32 + 32 + 2 * 32 * 40 + 40 + 32)
            + 2 * 50 * 32,
        ),
    ],
    ids=CASES,
)
def test_the_number_of_parameters_is_the_closed_form(text, expected):
    config = topology(text)
    shapes = jax.eval_shape(lambda key: config.build(VOCAB, key=key), jax.random.key(0))
    assert tree.num_parameters(shapes) == expected


def written_out(text: str) -> TopologyConfig:
    """The same topology with the unit in it copied as often as it is repeated."""
    described = yaml.safe_load(text)
    first, *others = described["layers"]
    unit = {"type": "stacked", "layers": first["layers"]}
    described["layers"] = [unit] * first["repeat"] + others
    return topology(yaml.safe_dump(described))


@pytest.mark.slow
@ONE_TEXT
def test_repeating_a_unit_is_writing_it_out(text):
    repeated, copies = topology(text), written_out(text)
    ours, theirs = built(repeated), built(copies)
    assert [path for path, _ in tree.leaves(ours)] == [path for path, _ in tree.leaves(theirs)]
    np.testing.assert_allclose(logits(ours, inputs()), logits(theirs, inputs()), atol=1e-6)
    assert repeated.flops_per_token(50) == copies.flops_per_token(50)


def by_shape(config: ModelConfig) -> Any:
    """A model in which the parameters of a layer depend only on their shapes and the names of their modules."""

    def filled(path: str, leaf: Any) -> Any:
        shape = leaf.array.shape[1:] if leaf.axes[0].name == "layers" else leaf.array.shape
        module = ".".join(path.split(".")[-2:])
        rng = np.random.default_rng(zlib.crc32(f"{module} {shape}".encode()))
        values = np.broadcast_to(rng.normal(0, 0.2, shape), leaf.array.shape)
        return hax.named(jnp.asarray(values, jnp.float32), leaf.axes)

    shapes = jax.eval_shape(lambda key: config.build(VOCAB, key=key), jax.random.key(0))
    return tree.map_leaves(filled, shapes)


def test_layers_are_divided_without_a_change_of_the_function():
    """With the MLP first, a unit that is repeated has other layers than the same residuals in one list."""
    mlp = "{type: residual, layers: [{type: rms_norm}, {type: mlp, intermediate_dim: 48}]}"
    attention = "{type: residual, layers: [{type: rms_norm}, {type: attention, num_heads: 4}]}"
    last = "{type: rms_norm}"
    repeated = topology(
        f"{{type: stacked, layers: [{{type: nested, repeat: 2, layers: [{mlp}, {attention}]}}, {last}]}}"
    )
    listed = topology(f"{{type: stacked, layers: [{mlp}, {attention}, {mlp}, {attention}, {last}]}}")
    assert (repeated.stack_of_layer, listed.stack_of_layer) == ((0, 0), (0, 1))
    np.testing.assert_allclose(
        logits(by_shape(repeated), inputs()), logits(by_shape(listed), inputs()), rtol=1e-6, atol=1e-6
    )


@pytest.mark.slow
def test_a_group_inside_of_a_residual_is_written_out():
    def with_inner(inner: str) -> TopologyConfig:
        return topology(
            "{type: stacked, layers: [{type: residual, layers: [{type: attention, num_heads: 4}]},"
            f" {{type: residual, layers: [{inner}]}}, {{type: rms_norm}}]}}"
        )

    linear = "{type: linear}"
    repeated = with_inner(f"{{type: nested, repeat: 2, layers: [{{type: rms_norm}}, {linear}]}}")
    listed = with_inner(f"{{type: rms_norm}}, {linear}, {{type: rms_norm}}, {linear}")
    np.testing.assert_array_equal(logits(built(repeated), inputs()), logits(built(listed), inputs()))


DECODER = {**SIZES, "intermediate_dim": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
FAMILIES = {
    "llama": (LlamaConfig(**DECODER), "{type: attention, num_heads: 4, num_kv_heads: 2}", "swiglu"),
    "biased": (
        LlamaConfig(**DECODER, attention_bias=True, mlp_bias=True, head_dim=12, sliding_window=5),
        "{type: attention, num_heads: 4, num_kv_heads: 2, head_dim: 12, bias: true, sliding_window: 5}",
        "swiglu, bias: true",
    ),
    "dba": (
        DbaConfig(**DECODER, sem_dim=16, geo_dim=24, gate="dynamic", null_slot=True, rope_semantic=True, rotary_dim=12),
        """{type: attention, mode: decoupled, num_heads: 4, num_kv_heads: 2, sem_dim: 16, geo_dim: 24, gate: dynamic,
        null_slot: true, rope_semantic: true, rotary_dim: 12}""",
        "swiglu",
    ),
    "dba with shared keys": (
        DbaConfig(**DECODER, sem_dim=16, geo_dim=24, num_key_heads=1),
        "{type: attention, mode: decoupled, num_heads: 4, num_kv_heads: 2, sem_dim: 16, geo_dim: 24, num_key_heads: 1}",
        "swiglu",
    ),
    "tied dba": (
        DbaConfig(**{**DECODER, "num_kv_heads": 4}, sem_dim=16, geo_dim=0, tie_qk=True, output_bias=True),
        """{type: attention, mode: decoupled, num_heads: 4, num_kv_heads: 4, sem_dim: 16, geo_dim: 0, tie_qk: true,
        output_bias: true}""",
        "swiglu",
    ),
    "mixtral": (
        MixtralConfig(**DECODER, num_experts=4, num_experts_per_token=2),
        "{type: attention, num_heads: 4, num_kv_heads: 2, rope: {theta: 1.0e+6}}",
        "moe, num_experts: 4",
    ),
}


def spelled(attention: str, mlp: str) -> TopologyConfig:
    """A topology of three pre-norm layers."""
    return topology(
        "{type: stacked, layers: [{type: nested, repeat: 3, layers: ["
        f"{{type: residual, layers: [{{type: rms_norm}}, {attention}]}},"
        f" {{type: residual, layers: [{{type: rms_norm}}, {{type: {mlp}, intermediate_dim: 48}}]}}"
        "]}, {type: rms_norm}]}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention", "mlp"), one_of(FAMILIES.values(), but=3), ids=FAMILIES)
def test_a_family_that_is_spelled_out_computes_the_same(family, attention, mlp):
    config, theirs = spelled(attention, mlp), built(family)
    shapes = jax.eval_shape(lambda key: config.build(VOCAB, key=key), jax.random.key(0))
    parameters = dict(tree.leaves(theirs))
    assert {path: leaf.axes for path, leaf in tree.leaves(shapes)} == {p: a.axes for p, a in parameters.items()}
    ours = tree.map_leaves(lambda path, _: parameters[path], shapes)
    np.testing.assert_allclose(logits(ours, inputs()), logits(theirs, inputs()), atol=1e-5)
    assert config.flops_per_token(50) == family.flops_per_token(50)
    losses = [jax.jit(lambda model: model.hidden(inputs()).aux)(model) for model in (ours, theirs)]
    assert losses[0].keys() == losses[1].keys()
    for name, loss in losses[0].items():
        np.testing.assert_allclose(loss.sum.total, losses[1][name].sum.total, rtol=1e-6)
        assert loss.coefficient == losses[1][name].coefficient


@pytest.mark.slow
def test_norms_around_attention_and_mlp_are_those_of_a_hybrid_llama():
    config, norm = spelled(FAMILIES["llama"][1], "swiglu"), {"type": "rms_norm"}
    described = encode(config.topology)
    for residual in described["layers"][0]["layers"]:
        residual["layers"].append(norm)
    ours = built(topology(yaml.safe_dump(described)))
    theirs = built(LlamaConfig(**DECODER, hybrid_norm=True))
    assert isinstance(ours.body.layers.stacked, DecoderBlock)
    np.testing.assert_allclose(logits(ours, inputs()), logits(copied(theirs, ours), inputs()), atol=1e-6)


def copied(to: Any, of: Any) -> Any:
    parameters = dict(tree.leaves(of))
    return tree.map_leaves(lambda path, _: parameters[path], to)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_layers_with_other_heads_have_rotary_embeddings_of_their_own(silent):
    """A layer whose attention is multiplied by 0 leaves a model that only has the other one."""
    heads = ["{type: attention, num_heads: 4}", "{type: attention, num_heads: 2, head_dim: 24}"]

    def residuals(attentions: list[str]) -> TopologyConfig:
        layers = ", ".join(f"{{type: residual, layers: [{{type: rms_norm}}, {one}]}}" for one in attentions)
        return topology(
            f"{{type: stacked, layers: [{{type: nested, repeat: 2, layers: [{layers}]}}, {{type: rms_norm}}]}}"
        )

    both, alone = by_shape(residuals(heads)), by_shape(residuals(heads[1 - silent : 2 - silent]))
    prefix = f"body.{silent}."
    both = tree.map_leaves(lambda p, x: x * 0 if p.startswith(prefix) and "o_proj" in p else x, both)
    np.testing.assert_allclose(logits(both, inputs()), logits(alone, inputs()), rtol=1e-5, atol=1e-5)
    new, expected = (generate(model, [[3, 1, 4, 1, 5]], max_new_tokens=8, temperature=0.0) for model in (both, alone))
    assert new == expected


@pytest.mark.slow
@ONE_TEXT
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_decoding_with_a_cache_computes_the_same(text, cut):
    model, read = built(topology(text)), inputs()
    if cut:
        model = SplitAtConfig(layer=1).apply(model, key=jax.random.key(0))
    expected = logits(model, read)

    @jax.jit
    def extended(model, cache, part):
        hidden = model.hidden(part, cache=cache)
        return model.logits(hidden.final).rearrange(("batch", "position", "vocab")).array, hidden.cache

    cache = model.init_cache(hax.Axis("batch", 2), 16, jnp.float32)
    for start, stop in ((0, 9), *((at, at + 1) for at in range(9, 16))):
        part = Inputs(*(a["position", start:stop] for a in (read.tokens, read.positions, read.segment_ids)))
        out, cache = extended(model, cache, part)
        np.testing.assert_allclose(out, expected[:, start:stop], atol=1e-4)


@pytest.mark.slow
@ONE_TEXT
def test_generation_continues_as_the_whole_text_says(text):
    model, prompt = built(topology(text)), [[3, 1, 4, 1, 5, 9, 2, 6]]
    new = generate(model, prompt, max_new_tokens=8, temperature=0.0)[0]
    whole = np.array([prompt[0] + new] * 2)
    axes = (hax.Axis("batch", 2), hax.Axis("position", 16))
    read = Inputs(
        *(hax.named(jnp.asarray(a), axes) for a in (whole, np.tile(np.arange(16), (2, 1)), np.ones_like(whole)))
    )
    assert np.argmax(logits(model, read)[0, 7:15], axis=-1).tolist() == new


@pytest.mark.slow
@pytest.mark.parametrize("text", slow_but("mixed"))
def test_a_packed_document_is_computed_as_if_it_were_alone(text):
    model = built(topology(text))
    positions, segments = np.r_[np.arange(6), np.arange(10)], np.r_[np.full(6, 1), np.full(10, 2)]
    packed = inputs(positions=np.tile(positions, (2, 1)), segments=np.tile(segments, (2, 1)))
    alone = Inputs(*(a["position", 6:16] for a in (packed.tokens, packed.positions, packed.segment_ids)))
    np.testing.assert_allclose(logits(model, packed)[:, 6:], logits(model, alone), atol=1e-5)


@pytest.mark.slow
@ONE_TEXT
def test_scans_and_recomputation_do_not_change_gradients(text):
    def loss(model):
        return (model.logits(model.hidden(inputs()).final).array ** 2).mean()

    results = []
    for scan, keep in ((True, "none"), (True, "full"), (False, "cheap")):
        config = dataclasses.replace(topology(text), scan_layers=scan, gradient_checkpointing=keep)
        results.append(jax.jit(jax.grad(loss, allow_int=True))(built(config)))
    for other in results[1:]:
        for (path, ours), (_, theirs) in zip(tree.leaves(results[0]), tree.leaves(other), strict=True):
            if tree.is_inexact(ours):
                np.testing.assert_allclose(theirs.array, ours.array, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", one_of(["tp 2 x fsdp 4", "fsdp 8"]))
@pytest.mark.parametrize("text", one_of([MIXED, ALTERNATING]), ids=["mixed", "alternating"])
def test_eight_devices_train_as_one(text, mesh):
    config = topology(text, seq_len=16)
    runs = [TinyRun(where, phase(), model=config) for where in (layout(**MESHES[mesh]), one_device())]
    losses = np.array([[run.step(arrays(seed))["train/loss"] for seed in range(4)] for run in runs])
    assert losses[1][0] - losses[1][-1] > 0.1
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.slow
def test_taps_are_the_stream_after_each_attention_and_what_follows_it():
    model = built(topology(MIXED))
    names = ("embedding", layer_tap(0), layer_tap(2), "final")
    hidden = jax.jit(lambda model: model.hidden(inputs(), taps=names))(model)
    assert model.config.Layers.size == 3
    np.testing.assert_array_equal(hidden.taps["final"].array, hidden.final.array)
    # It does not end with a norm, so nothing is between the last layer and the head.
    np.testing.assert_array_equal(hidden.taps[layer_tap(2)].array, hidden.final.array)


@pytest.mark.slow
def test_a_model_without_some_of_its_layers_describes_itself():
    model = built(topology(ALTERNATING))
    fewer = model.with_layers([0, 3])
    fewer.config.check()
    assert [layer.structure for layer in fewer.config.layers] == [model.config.layers[n].structure for n in (0, 3)]
    again = jax.eval_shape(lambda key: fewer.config.build(VOCAB, key=key), jax.random.key(0))
    assert {p: leaf.axes for p, leaf in tree.leaves(again)} == {p: leaf.axes for p, leaf in tree.leaves(fewer)}
    np.testing.assert_array_equal(logits(copied(again, fewer), inputs()), logits(fewer, inputs()))
    silenced = model
    for path, place in (("body.0.", 1), ("body.1.", 0)):  # layers 1 and 2 are those that are left out

        def without(name, leaf, path=path, place=place):
            if not name.startswith(path) or not any(part in name for part in ("o_proj", "down_proj", "linear_2")):
                return leaf
            return hax.named(leaf.array.at[place].set(0.0), leaf.axes)

        silenced = tree.map_leaves(without, silenced)
    np.testing.assert_allclose(logits(silenced, inputs()), logits(fewer, inputs()), atol=1e-5)


DROPPING = """
type: stacked
layers:
  - {type: residual, layers: [{type: attention, num_heads: 4, dropout: PA}, {type: dropout, probability: PB}]}
  - {type: rms_norm}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "output"), [(0.5, 0.0), (0.0, 0.5)])
def test_dropout_needs_a_key(attention, output):
    text = DROPPING.replace("PA", str(attention)).replace("PB", str(output))
    model, none = built(topology(text)), built(topology(DROPPING.replace("PA", "0.0").replace("PB", "0.0")))
    final = jax.jit(lambda model, key: model.hidden(inputs(), key=key).final.array)
    np.testing.assert_array_equal(final(model, None), final(none, None))
    assert not np.array_equal(final(model, jax.random.key(0)), final(model, None))
    assert not np.array_equal(final(model, jax.random.key(0)), final(model, jax.random.key(1)))


@pytest.mark.slow
def test_dropout_keeps_the_mean_and_zeroes_the_share():
    text = "{type: stacked, layers: [{type: attention, num_heads: 4}, {type: dropout, probability: 0.25}]}"
    model = built(topology(text))
    dropped = model.hidden(inputs(), key=jax.random.key(0)).final.array
    kept = np.asarray(dropped != 0)
    np.testing.assert_allclose(dropped[kept], model.hidden(inputs()).final.array[kept] / 0.75, rtol=1e-5)
    assert abs(kept.mean() - 0.75) < 0.05


@pytest.mark.slow
def test_adapters_are_found_by_readable_paths():
    model = built(topology(MIXED))
    adapted = LoraConfig(rank=2, target=r"attn|linear|mlp\.up").apply(model, key=jax.random.key(0))
    paths = [path for path, _ in tree.leaves(adapted) if path.endswith(".a")]
    assert "body.1.layers.stacked.parts.residual.parts.attn.q_proj.a" in paths
    assert "body.0.layers.stacked.attn.q_sem.a" in paths
    assert "body.1.layers.stacked.parts.residual_2.parts.mlp.up_proj.a" in paths
    np.testing.assert_allclose(logits(adapted, inputs()), logits(model, inputs()), atol=1e-6)
    changed = tree.map_leaves(lambda p, x: x + 0.1 if p.endswith(".b") else x, adapted)
    merged = LoraConfig(rank=2, target=r"attn|linear|mlp\.up").merge(changed)
    assert not np.allclose(logits(merged, inputs()), logits(model, inputs()), atol=1e-2)
    np.testing.assert_allclose(logits(merged, inputs()), logits(changed, inputs()), atol=1e-4)


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_a_config_is_written_as_it_is_read(text):
    config = topology(text)
    assert decode(Sections, ConfigSource({"model": encode(config)})).model == config


ATTENTION = "{type: residual, layers: [{type: attention, num_heads: 4}]}"
WIDER, EXPERTS = "{type: linear, output_dim: 48}", "{type: moe, intermediate_dim: 8}"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("", r"model\.topology\.layers: \[\] given, at least one layer expected"),
        ("{type: residual, layers: []}", r"model\.topology\.layers\.0\.layers: \[\] given, at least one"),
        ("{type: rms_norm}", r"model\.topology: no attention given"),
        (
            "{type: attention, num_heads: 4, hidden_dim: 64}",
            r"layers\.0\.hidden_dim: 64 given, but 32 features come in",
        ),
        (
            "{type: attention, num_heads: 5}",
            r"layers\.0\.num_heads: 5 given, which does not divide model\.topology\.layers\.0",
        ),
        (
            "{type: attention, num_heads: 4, num_kv_heads: 3}",
            r"layers\.0\.num_kv_heads: 3 given, which does not divide",
        ),
        ("{type: attention, num_heads: 4, head_dim: 7}", r"layers\.0\.num_heads: 4 heads have 7 features"),
        (
            "{type: attention, num_heads: 4, mode: standard, num_kv_heads: 2}",
            r"num_kv_heads: 2 given, but mode: standard",
        ),
        (
            "{type: attention, num_heads: 4, sem_dim: 8}",
            r"layers\.0\.sem_dim: 8 given without mode: decoupled, but mode is gqa",
        ),
        (
            "{type: attention, num_heads: 4, null_slot: true}",
            r"layers\.0\.null_slot: true given without mode: decoupled",
        ),
        (
            "{type: attention, num_heads: 4, mode: decoupled, sem_dim: 8}",
            r"mode: decoupled given without geo_dim, where 0 stands for none\. Set geo_dim",
        ),
        (
            "{type: attention, num_heads: 4, mode: decoupled, sem_dim: 8, geo_dim: 12}",
            r"layers\.0\.geo_dim: 12 given, so each of 4 heads has 3",
        ),
        (
            "{type: attention, num_heads: 4, mode: decoupled, sem_dim: 8, geo_dim: 8, dropout: 0.1}",
            r"layers\.0\.dropout: 0\.1 given together with mode: decoupled",
        ),
        (f"{ATTENTION}, {{type: linear, output_dim: 48}}", r"layers\.1: 32 features come in and 48 come out"),
        (
            f"{ATTENTION}, {{type: residual, layers: [{{type: linear, output_dim: 48}}]}}",
            r"layers\.1: x has 32 features and f\(x\) has 48",
        ),
        (
            f"{ATTENTION}, {{type: residual, layers: [{WIDER}, {{type: rms_norm, hidden_dim: 32}}]}}",
            r"layers\.1\.layers\.1\.hidden_dim: 32 given, but 48 features come in",
        ),
        (
            "{type: residual, layers: [{type: nested, repeat: 2, layers: [{type: attention, num_heads: 4}]}]}",
            r"layers\.0: 2 attention layers in one residual \(model\.topology\.layers\.0\.layers\.0\.layers\.0\)",
        ),
        (f"{ATTENTION}, {{type: mlp, intermediate_dim: 8, activation_function: x}}", r"activation_function: 'x' given"),
        (
            f"{ATTENTION}, {{type: moe, intermediate_dim: 8, num_experts: 1}}",
            r"layers\.1\.num_experts: 1 given, 2 or more",
        ),
        (
            f"{ATTENTION}, {{type: moe, intermediate_dim: 8}}, {{type: moe, intermediate_dim: 8}}",
            r"layers\.2: a second moe after the same attention; the first is model\.topology\.layers\.1",
        ),
        (
            f"{ATTENTION}, {EXPERTS}, {ATTENTION}, {{type: moe, intermediate_dim: 8, num_experts: 4}}",
            r"layers\.3\.num_experts: 4 given, but model\.topology\.layers\.1 has 8",
        ),
        (f"{ATTENTION}, {{type: layer_norm, weight: false}}, {ATTENTION}", r"layers\.1\.bias: true given, but a norm"),
        (f"{ATTENTION}, {{type: rms_norm, hidden_dim: 8}}", r"layers\.1\.hidden_dim: 8 given, but 32"),
        (f"{ATTENTION}, {{type: dropout, probability: 1.0}}", r"layers\.1\.probability: 1\.0 given"),
        ("{type: attention}", r"the key 'num_heads' is missing"),
        ("{repeat: 2}", r"layers\.0\.type: no type given. Allowed: attention, dropout"),
        ("{type: conv, size: 2}", r"layers\.0\.type: 'conv' given. Allowed: attention, dropout, glu"),
    ],
)
def test_what_cannot_be_built_is_refused(layers, message):
    with pytest.raises(ConfigError, match=message):
        topology(f"{{type: stacked, layers: [{layers}]}}").check()
