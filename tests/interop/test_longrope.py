"""LongRoPE: the factors of a text depend on its length, as in transformers, with and without a cache."""

import dataclasses
import functools
import json

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import jaxlm
from jaxlm.interop.hf.family import config_from_json, config_to_json
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.form import form_of_json
from jaxlm.models.base import Inputs
from jaxlm.models.inference import prefix_cache as prefix_cache_module
from jaxlm.models.inference.generate import GenerationConfig, generate, generate_tokens, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.responses import Noise, sample_responses
from jaxlm.models.inference.sampling import Sampling
from jaxlm.models.inference.unstacked import Generator
from jaxlm.models.rope import Places
from tests.answers import write_tokenizer
from tests.engine.helpers import layout, one_device
from tests.interop.cases import abstract_of, inputs_of, logits_of, reference, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ORIGINAL = 48
LENGTHS = (44, 48, 49, 90)
TEXTS = [row[:length] for row, length in zip(tokens(4, 90).tolist(), LENGTHS, strict=True)]
# Granite has the multipliers of MiniCPM.
EVERY = ["phi3-grows", *(pytest.param(f"{name}-grows", marks=pytest.mark.slow) for name in ("phi4-mini", "granite"))]


@functools.lru_cache
def imported(name, path):
    reference(name).save_pretrained(path)
    opened = open_folder(path)
    return load_model(path, abstract_of(opened.config), opened.config, one_device())


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The model of a case."""
    folder = tmp_path_factory.mktemp("models")
    return lambda name: imported(name, folder / name)


def packed(texts, width):
    """All texts in one row, each a document."""
    columns = np.zeros((3, 1, width), np.int32)
    start = 0
    for number, text in enumerate(texts):
        part = slice(start, start + len(text))
        columns[0, 0, part], columns[1, 0, part], columns[2, 0, part] = text, range(len(text)), number + 1
        start = part.stop
    axes = (Axis("batch", 1), Axis("position", width))
    return Inputs(*(hax.named(jnp.asarray(column), axes) for column in columns))


def their_logits(name, text):
    with torch.no_grad():
        return reference(name)(torch.tensor([text])).logits[0].numpy()


@pytest.mark.parametrize("name", EVERY)
def test_every_document_of_a_row_has_the_logits_of_the_text_alone(name, opened):
    ours = np.asarray(logits_of(opened(name), packed(TEXTS, 240)))[0]
    for text, end in zip(TEXTS, np.cumsum(LENGTHS), strict=True):
        expected = their_logits(name, text)
        np.testing.assert_allclose(ours[end - len(text) : end], expected, rtol=1e-4, atol=1e-5)
    # The factors are no detail: a text of 48 tokens is computed otherwise as the beginning of one of 49.
    assert np.abs(their_logits(name, TEXTS[2][:ORIGINAL]) - their_logits(name, TEXTS[2])[:ORIGINAL]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_greedy_texts_grow_beyond_the_original_length(name, opened):
    """Rows cross at steps of their own. transformers computes the cache again for Phi-3; for other families it keeps one of
    both kinds, and its text without a cache is another one."""
    ours = generate(opened(name), TEXTS, max_new_tokens=20, temperature=0.0)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for use_cache in (False, True) if name.startswith("phi") else (False,):
        for text, found in zip(TEXTS, ours, strict=True):
            ids = torch.tensor([text])
            with torch.no_grad():  # without a mask, transformers would hide the tokens that are its padding
                expected = reference(name).generate(
                    ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, **options
                )
            assert found == expected[0, len(text) :].tolist(), (len(text), use_cache)


@pytest.mark.slow
def test_logits_and_log_probs_of_a_batch_of_texts(tmp_path):
    reference("phi3-grows").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    model = jaxlm.load(tmp_path)
    logits, log_probs = model.logits(TEXTS, batch_size=3), model.log_probs(TEXTS, batch_size=3)
    for text, ours, probabilities in zip(TEXTS, logits, log_probs, strict=True):
        expected = their_logits("phi3-grows", text)
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
        following = torch.log_softmax(torch.tensor(expected[:-1]), -1)[range(len(text) - 1), text[1:]]
        np.testing.assert_allclose(probabilities, following.numpy(), rtol=1e-4, atol=1e-5)


def after(model, text):
    """Log-probabilities of the token after a text, computed without a cache."""
    width = 128  # one program
    inputs = packed([text], width)
    return np.asarray(jax.nn.log_softmax(logits_of(model, inputs)[0, len(text) - 1]))


@pytest.mark.slow
def test_sampled_tokens_have_the_log_likelihoods_of_forward_passes(opened):
    model = opened("phi3-grows")
    found = sample_responses(
        *(Generator.of(model), TEXTS, range(4), Noise(0, 0)), max_new_tokens=8, sampling=Sampling(1.0), stop_ids=()
    )
    for text, new, logps in zip(TEXTS, found.tokens.tolist(), found.logps, strict=True):
        expected = [after(model, [*text, *new[:number]])[token] for number, token in enumerate(new)]
        np.testing.assert_allclose(logps, expected, atol=1e-5)


@pytest.mark.soak
def test_a_mesh_generates_and_samples_the_same(opened):
    """There, layers and cache are stacked."""
    model = opened("phi3-grows")
    options = {"max_new_tokens": 8, "sampling": Sampling(1.0), "stop_ids": ()}
    alone = sample_responses(Generator.of(model), TEXTS, range(4), Noise(0, 0), **options)
    greedy = generate(model, TEXTS, max_new_tokens=8, temperature=0.0)
    where = layout(model=2)
    with where.use():
        place = lambda a: hax.NamedArray(jax.device_put(a.array, where.parameter_sharding(a.axes)), a.axes)  # noqa: E731
        placed = jax.tree.map(place, model, is_leaf=lambda a: isinstance(a, hax.NamedArray))
        found = sample_responses(Generator.of(placed), TEXTS, range(4), Noise(0, 0), **options)
        assert generate(placed, TEXTS, max_new_tokens=8, temperature=0.0) == greedy
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    np.testing.assert_allclose(found.logps, alone.logps, atol=1e-5)


@pytest.mark.slow
def test_a_prefix_is_reused_only_where_it_has_the_factors_of_the_text(opened, monkeypatch):
    """Turns within the original length, across it, beyond it, and back. Long turns are read in chunks."""
    monkeypatch.setattr(prefix_cache_module, "_PREFILL_CHUNK", 16)
    monkeypatch.setattr(prefix_cache_module, "padded_length", lambda n: -(-n // 16) * 16)
    writer, decoding, prefix_cache = Generator.of(opened("phi3-grows")), GenerationConfig(6, 0.0), PrefixCache()
    whole, held = tokens(1, 120)[0].tolist(), []
    lookup = PrefixCache.lookup
    monkeypatch.setattr(PrefixCache, "lookup", lambda *args: held.append(lookup(*args)) or held[-1])
    # 30 to 36 tokens; 40 to 46; across, 46 to 52; beyond; by several chunks; back to 30, and beyond from there.
    for length in (30, 40, 46, 100, 114, 30, 60):
        pieces = stream_tokens(writer, [whole[:length]], decoding, every=4, prefix_cache=prefix_cache)
        ours = [token for (piece,) in pieces for token in piece]
        assert ours == generate_tokens(writer, [whole[:length]], decoding)[0], length
    assert [number for _, number in held] == [0, 24, 30, 0, 98, 0, 0]


def test_the_length_of_a_document_does_not_depend_on_the_rest_of_its_row():
    ids = np.array([[0, 0, 1, 1, 1, 2, 3, 3], [7, 7, 7, 7, 7, 7, 0, 0]], np.int32)
    positions = np.array([[0, 0, 0, 1, 2, 0, 0, 1], [4, 5, 6, 7, 8, 9, 0, 0]], np.int32)
    expected = np.array([[1, 1, 3, 3, 3, 1, 2, 2], [10, 10, 10, 10, 10, 10, 1, 1]])
    axes = (Axis("batch", 2), Axis("position", 8))
    places = Places(*(hax.named(jnp.asarray(a), axes) for a in (positions, ids)))
    np.testing.assert_array_equal(places.lengths(), expected)
    by_context = jax.sharding.NamedSharding(layout().mesh, jax.sharding.PartitionSpec(None, "data"))
    np.testing.assert_array_equal(jax.jit(Places.lengths)(jax.device_put(places, by_context)), expected)


OUTSIDE = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("kind", "keys", "outside"),
    [
        ("phi3", {}, {OUTSIDE: ORIGINAL}),
        ("phi3", {OUTSIDE: 20}, {OUTSIDE: ORIGINAL}),  # the key outside counts
        ("phi3", {OUTSIDE: 20}, {}),  # and if it is missing, its default
        ("phi3", {"attention_factor": 1.3}, {OUTSIDE: ORIGINAL}),
        ("phi3", {"factor": 1.7}, {OUTSIDE: ORIGINAL}),  # no whole number of tokens
        ("phi3", {"factor": 1.7, "attention_factor": 0.9}, {OUTSIDE: ORIGINAL}),
        ("granite", {OUTSIDE: ORIGINAL}, {}),
        ("granite", {OUTSIDE: ORIGINAL, "factor": 8.0}, {}),
        ("granite", {"factor": 2.5}, {}),
    ],
    ids=str,
)
def test_keys_of_the_rotary_embedding_mean_what_they_mean_in_transformers(kind, keys, outside, tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    content = reference(f"{kind}-grows").config.to_dict() | outside
    rope = {key: content["rope_parameters"][key] for key in ("rope_type", "rope_theta", "short_factor", "long_factor")}
    content |= {"rope_parameters": rope | keys, "architectures": None}
    content = {key: value for key, value in content.items() if key != OUTSIDE or outside}
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs, ours = transformers.AutoConfig.from_pretrained(tmp_path), open_folder(tmp_path).config
    for length in (ORIGINAL, ORIGINAL + 1):
        row = inputs_of(np.zeros((1, length), int))
        found = ours.rope.frequencies(8, Places(row.positions, row.segment_ids))
        # transformers calls it for the original length and for one more.
        is_long = length > theirs.rope_parameters[OUTSIDE]
        frequencies, expected = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=10**6 if is_long else None)
        np.testing.assert_allclose(np.broadcast_to(found, (1, length, 4))[0, -1], frequencies.numpy(), rtol=1e-6)
        assert ours.rope.amplitude == pytest.approx(expected, rel=1e-12)
    family = form_of_json(content, "").family
    for same in (ours, dataclasses.replace(ours, seq_len=32)):  # trained with shorter rows
        assert config_from_json(family, config_to_json(family, same), "")[0] == same
