"""Cached decoding against full forward passes, and the sampling options."""

from dataclasses import replace
from itertools import chain

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.core.axes import HEAD_SIZE
from jaxlm.core.errors import ConfigError
from jaxlm.core.products.stored_weights import quantize
from jaxlm.models.base import Inputs
from jaxlm.models.inference.decoding import num_programs
from jaxlm.models.inference.generate import CACHE_DTYPES, GenerationConfig, generate, generate_tokens, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.sampling import Sampling
from jaxlm.models.inference.unstacked import Generator
from tests.engine.helpers import layout

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]


@pytest.fixture
def model(tiny, built):
    return built(tiny)


@pytest.fixture
def llama(tiny_llama, built):
    return built(tiny_llama)


@pytest.mark.slow
def test_cache_equals_the_full_forward_pass(model, as_inputs, logits_of):
    tokens = np.random.default_rng(0).integers(0, 40, size=(2, 12))
    # the second row is padded by four on the left
    segments = np.ones_like(tokens)
    segments[1, :4] = 0
    positions = np.maximum(np.arange(12) - np.array([[0], [4]]), 0)
    whole = as_inputs(tokens, positions, segments)
    expected = logits_of(model, whole)
    cache = model.init_cache(Axis("batch", 2), 16, jnp.float32)

    @jax.jit
    def step(inputs, cache):
        hidden = model.hidden(inputs, cache=cache)
        return hidden.cache, model.logits(hidden.final).array

    got = []
    for start, stop in [(0, 5), (5, 6), (6, 7), (7, 12)]:
        part = jax.tree.map(
            lambda a, s=slice(start, stop): a["position", s], whole, is_leaf=lambda a: isinstance(a, hax.NamedArray)
        )
        cache, logits = step(part, cache)
        assert int(cache.length) == stop
        got.append(logits)
    got = np.concatenate(got, axis=1)
    np.testing.assert_allclose(got[segments == 1], expected[segments == 1], rtol=1e-4, atol=1e-4)


@jax.jit
def logits_at(model, tokens, last):
    (length,) = tokens.shape
    columns = (tokens[None], jnp.arange(length)[None], (jnp.arange(length) <= last)[None].astype(jnp.int32))
    axes = (Axis("batch", 1), Axis("position", length))
    return model.logits(model.hidden(Inputs(*(hax.named(c, axes) for c in columns))).final).array[0, last]


def greedy_by_hand(model, prompt, num_new, length=32):
    """One full forward pass over a padded row per token."""
    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + num_new):
        tokens[at] = int(np.argmax(logits_at(model, tokens, at - 1)))
    return tokens[len(prompt) : len(prompt) + num_new].tolist()


@pytest.mark.slow
def test_greedy_rows_of_a_batch_equal_full_forward_passes(model):
    new = generate(model, PROMPTS, max_new_tokens=12, temperature=0.0)
    assert new == [greedy_by_hand(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch(llama):
    options = {"max_new_tokens": 10, "temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 3}
    together = generate(llama, PROMPTS, **options)
    assert together == [generate(llama, [prompt], **options)[0] for prompt in PROMPTS]
    assert generate(llama, PROMPTS[::-1], **options) == together[::-1]
    assert generate(llama, PROMPTS, **{**options, "seed": 4}) != together
    twice = generate(llama, [PROMPTS[0]] * 2, **options)
    assert twice[0] == together[0]
    assert twice[1] != twice[0], "the same prompt again is another sample"


@pytest.mark.slow
def test_end_tokens_are_not_returned(llama):
    free = generate(llama, PROMPTS, max_new_tokens=10, temperature=1.0, seed=1)
    eos = free[2][4]
    stopped = generate(llama, PROMPTS, max_new_tokens=10, temperature=1.0, seed=1, eos_id=eos)
    assert stopped == [row[: row.index(eos)] if eos in row else row for row in free]
    other = next(token for token in range(len(free[0]) * 3 + 1) if not any(token in row for row in free))
    with_stop = GenerationConfig(10, temperature=1.0, seed=1, stop_ids=(other, eos), with_stop=True)
    ended = generate_tokens(Generator.of(llama), PROMPTS, with_stop)
    assert ended == [row[: row.index(eos) + 1] if eos in row else row for row in free]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [{}, {"model": 2}, pytest.param({"replica": 2}, marks=pytest.mark.soak)], ids=str)
def test_a_mesh_gives_the_same_tokens(llama, shards):
    """Fewer rows than devices, of several lengths; with an int8 cache too."""
    decoding = GenerationConfig(12, temperature=0.0)
    alone = [generate_tokens(Generator.of(llama), [prompt], decoding)[0] for prompt in PROMPTS]
    where = layout(**shards)
    with where.use():
        placed = jax.tree.map(
            lambda a: hax.NamedArray(jax.device_put(a.array, where.parameter_sharding(a.axes)), a.axes),
            llama,
            is_leaf=lambda a: isinstance(a, hax.NamedArray),
        )
        assert generate_tokens(Generator.of(placed), PROMPTS, decoding) == alone
        small = generate_tokens(Generator.of(placed), PROMPTS, replace(decoding, cache_dtype="int8"))
    assert small == generate_tokens(Generator.of(llama), PROMPTS, replace(decoding, cache_dtype="int8"))


@pytest.mark.slow
def test_other_reasons_to_stop(llama):
    """Several end tokens, and a condition on the row that is checked every few tokens."""
    decoding = GenerationConfig(24, temperature=1.0, seed=1)
    free = generate_tokens(Generator.of(llama), PROMPTS[:2], decoding)
    ends = (free[0][7], free[1][3])
    cut = [row[: min(row.index(end) for end in ends if end in row)] for row in free]
    assert generate_tokens(Generator.of(llama), PROMPTS[:2], replace(decoding, stop_ids=ends)) == cut
    few = generate_tokens(Generator.of(llama), PROMPTS[:2], decoding, until=lambda row: row[:2] == free[0][:2])
    assert (len(few[0]), few[1]) == (16, free[1])
    assert few[0] == free[0][:16]


@pytest.mark.slow
def test_streaming_gives_the_generated_tokens(llama):
    decoding = GenerationConfig(10, temperature=0.7, seed=2)
    pieces = list(stream_tokens(Generator.of(llama), PROMPTS, decoding, every=4))
    assert [len(piece[0]) for piece in pieces] == [4, 4, 2]
    whole = generate_tokens(Generator.of(llama), PROMPTS, decoding)
    assert [list(chain(*rows)) for rows in zip(*pieces, strict=True)] == whole
    pieces = list(stream_tokens(Generator.of(llama), PROMPTS, decoding, every=4, first=1))
    assert [len(piece[0]) for piece in pieces] == [1, 4, 4, 1]
    assert [list(chain(*rows)) for rows in zip(*pieces, strict=True)] == whole


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2e-2), ("int8", 4e-2)])
def test_a_low_precision_cache_is_nearly_as_accurate(llama, dtype, most):
    """The error of logits relative to their standard deviation, and greedy tokens until the two paths diverge."""
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, 40, size=(16, 8)).tolist()
    exact, rounded = (
        generate_tokens(Generator.of(llama), prompts, GenerationConfig(16, temperature=0.0, cache_dtype=d))
        for d in ("float32", dtype)
    )
    same = np.mean([a == b for a, b in zip(chain(*exact), chain(*rounded), strict=True)])
    assert same >= 0.9, same
    errors = cached_logits(llama, CACHE_DTYPES[dtype]) - cached_logits(llama, jnp.float32)
    assert 0 < np.sqrt(np.mean(errors**2)) < most * np.std(cached_logits(llama, jnp.float32))


def test_int8_rounds_to_the_nearest_of_255_steps():
    """The error is at most half a step of each head's and token's scale; zeros stay zeros."""
    values = np.random.default_rng(0).normal(size=(3, 5, 16)).astype(np.float32) * np.logspace(-3, 3, 5)[None, :, None]
    values[1, 2] = 0.0
    axes = (Axis("batch", 3), Axis("key_position", 5), Axis("head_size", 16))
    numbers, scale = quantize(hax.named(jnp.asarray(values, jnp.float32), axes), HEAD_SIZE)
    steps = np.abs(values).max(axis=-1) / 127
    np.testing.assert_allclose(scale.array, steps, rtol=1e-6)
    assert numbers.array.dtype == jnp.int8
    error = np.abs(numbers.array * np.asarray(scale.array)[..., None] - values)
    assert (error <= 0.501 * steps[..., None]).all()


def cached_logits(model, dtype):
    """Logits of the last of nine tokens, computed after the others."""
    tokens = np.random.default_rng(4).integers(0, 40, size=(4, 9))
    axes = (Axis("batch", 4), Axis("position", 9))
    columns = (tokens, np.broadcast_to(np.arange(9), tokens.shape), np.ones_like(tokens))
    whole = Inputs(*(hax.named(jnp.asarray(c, jnp.int32), axes) for c in columns))
    cache, hidden = model.init_cache(axes[0], 16, dtype), None
    for part in (slice(0, 8), slice(8, 9)):
        inputs = jax.tree.map(
            lambda a, s=part: a["position", s], whole, is_leaf=lambda a: isinstance(a, hax.NamedArray)
        )
        hidden = jax.jit(lambda i, c: model.hidden(i, cache=c))(inputs, cache)
        cache = hidden.cache
    return np.asarray(model.logits(hidden.final).array)


@pytest.mark.slow
def test_shapes_are_compiled_once(llama):
    options = {"max_new_tokens": 5, "temperature": 0.7}
    generate(llama, [[1, 2]], **options)
    before = num_programs()
    for length in range(1, 20):
        generate(llama, [[1] * length], **{**options, "max_new_tokens": 1 + length % 7, "seed": length})
    assert num_programs() == before


@pytest.mark.parametrize(
    ("prompts", "num_new", "message"),
    [
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1, 40]], 4, "token ids from 1 to 40, but the vocabulary has 40 tokens"),
        ([[-1]], 4, "ids from -1"),
        ([[1] * 30], 3, "prompt 0 has 30 tokens. .* seq_len of 32. .* at most 2"),
        ([[1]], -1, "max_new_tokens: -1"),
    ],
)
def test_invalid_requests_are_refused(llama, prompts, num_new, message):
    with pytest.raises(ConfigError, match=message):
        generate(llama, prompts, max_new_tokens=num_new)


@pytest.mark.parametrize("seed", [-1, 2**32, 10**20])
def test_seeds_that_jax_would_cut_off_are_refused(seed):
    with pytest.raises(ConfigError, match=f"seed: {seed} given, an integer of 0 or more and at most 4294967295"):
        GenerationConfig(4, seed=seed)


@pytest.mark.slow
def test_empty_requests_and_a_full_context(llama):
    assert generate(llama, [], max_new_tokens=4) == []
    assert generate(llama, [[1], [2]], max_new_tokens=0) == [[], []]
    assert len(generate(llama, [[1] * 28], max_new_tokens=4)[0]) == 4


def frequencies(sampling, logits, draws=20_000):
    keys = jax.random.split(jax.random.key(0), draws)
    rows, distribution = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits))), sampling.numbers
    drawn = distribution.draw(distribution.logits(rows, None), keys)
    return np.bincount(drawn, minlength=len(logits)) / draws


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.5, 0.1, 0.3]),
        ({"temperature": 0.5}, np.array([0.01, 0.25, 0.01, 0.09]) / 0.36),
        ({"top_k": 2}, [0, 0.625, 0, 0.375]),
        ({"top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [0, 0.625, 0, 0.375]),
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"min_p": 0.5}, [0, 0.625, 0, 0.375]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_sampling_draws_the_distribution_it_promises(options, expected):
    np.testing.assert_allclose(frequencies(Sampling(**options), np.log([0.1, 0.5, 0.1, 0.3])), expected, atol=0.012)


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}],
    ids=str,
)
def test_invalid_sampling_options_are_refused(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: "):
        Sampling(**options)


FILTERS = [
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "top_k": 12, "top_p": 0.7, "min_p": 0.2},
]


def logits_of_transformers(logits, texts, options, temperature):
    """What the processors of transformers' own generation make of logits."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=2, vocab_size=40))
    config = transformers.GenerationConfig(do_sample=True, temperature=temperature, **{"top_k": 0, **options})
    processors = model._get_logits_processor(config, input_ids_seq_length=texts.shape[1])
    return processors(torch.tensor(texts), torch.tensor(logits)).numpy()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_are_those_of_transformers(options, temperature):
    rng = np.random.default_rng(3)
    logits, texts = rng.normal(0, 2, (16, 40)).astype(np.float32), rng.integers(0, 40, (16, 9))
    if "top_p" not in options:  # of equal ones, transformers drops one or the other then, and we keep both
        logits[:, 7] = logits[:, 8]
    expected = logits_of_transformers(logits, texts, options, temperature)
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, texts, True, axis=1)
    found = Sampling(temperature, **options).numbers.logits(jnp.asarray(logits), jnp.asarray(seen))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_other_values_of_filters_compile_nothing(llama):
    def all_with(**options):
        generate(llama, [[1, 2]], max_new_tokens=4, seed=1, **options)

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    all_with(**dict(zip(names, (0.7, 5, 0.9, 0.1, 1.2), strict=True)))
    compiled = num_programs()
    all_with(**dict(zip(names, (0.9, 7, 0.8, 0.2, 1.5), strict=True)))
    assert num_programs() == compiled


@pytest.mark.slow
def test_a_repeated_token_is_penalized_in_prompt_and_text(llama):
    """A penalty so large that no token comes twice, with tokens of the prompt first."""
    prompts = [[1, 2, 3], [9]]
    found = generate(llama, prompts, max_new_tokens=12, temperature=0.0, repetition_penalty=1e6)
    assert found != generate(llama, prompts, max_new_tokens=12, temperature=0.0)
    whole = Generator.of(llama)
    for prompt, new in zip(prompts, found, strict=True):
        held = PrefixCache()
        options = GenerationConfig(4, temperature=0.0, repetition_penalty=1e6)
        text = list(prompt)
        for _ in range(3):  # the rest of the text comes from the cache
            pieces = stream_tokens(whole, [list(text)], options, every=2, prefix_cache=held)
            text += [token for piece in pieces for token in piece[0]]
        assert text == [*prompt, *new]
