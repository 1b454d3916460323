"""Sampled responses: their log-likelihoods, their end, their distribution, and what they depend on."""

import contextlib
import json
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.base import ModelTraits, vocab_axis
from jaxlm.models.inference import decoding, responses
from jaxlm.models.inference.responses import Noise, check_samples_as_trained, sample_responses
from jaxlm.models.inference.sampling import Sampling
from jaxlm.models.inference.unstacked import Generator
from jaxlm.models.layers import activation_dtype
from jaxlm.objectives.completions import token_logps
from jaxlm.surgery.fp8 import Fp8Config
from jaxlm.surgery.lora import LoraConfig
from tests.engine.helpers import layout

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "rollouts.json").read_text())["sampler"]
STOPS, MOST, TEMPERATURE, NOISE = (3, 17), 12, 0.7, Noise(5, 2)
SMALL = {"seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 2}


@pytest.fixture
def llama(tiny_llama, built):
    return built(tiny_llama)


def prompts_of(number: int) -> list[list[int]]:
    """Prompts of 1 to 9 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, 1 + place % 9).tolist() for place in range(number)]


PROMPTS = prompts_of(64)


def sampled(model, rows=range(64), *, noise=NOISE, temperature=TEMPERATURE, most=MOST, **options):
    prompts = [PROMPTS[row] for row in rows]
    # All calls have the same number of rows, so that they run the same program.
    settings = {"max_new_tokens": most, "sampling": Sampling(temperature), "stop_ids": STOPS, "num_rows": 64}
    return sample_responses(Generator.of(model), prompts, rows, noise, **settings | options)


@pytest.mark.slow
def test_log_likelihoods_are_those_of_a_forward_pass_and_rows_end_with_their_stop_token(llama):
    found = sampled(llama)
    lengths = (found.tokens >= 0).sum(axis=1)
    ends = [row[length - 1] in STOPS for row, length in zip(found.tokens, lengths, strict=True)]
    assert 10 < sum(ends) < 64  # some are cut off
    for row, length, is_finished in zip(found.tokens.tolist(), lengths, ends, strict=True):
        assert row[length:] == [-1] * (MOST - length)
        assert is_finished or length == MOST
        assert not set(row[: length - is_finished]) & set(STOPS)
    width = 24
    columns = {name: np.zeros((64, width), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    mask = np.zeros((64, width), np.float32)
    for row, (prompt, tokens, length) in enumerate(zip(PROMPTS, found.tokens, lengths, strict=True)):
        whole = [*prompt, *tokens[:length]]
        size = len(whole) - 1
        columns["tokens"][row, :size], columns["targets"][row, :size] = whole[:-1], whole[1:]
        columns["segment_ids"][row, :size], columns["positions"][row, :size] = 1, np.arange(size)
        mask[row, len(prompt) - 1 : size] = 1
    axes = (hax.Axis("batch", 64), hax.Axis("position", width))
    named = {name: hax.named(jnp.asarray(column), axes) for name, column in columns.items()}
    batch = TokenBatch(**named, loss_mask=hax.named(jnp.asarray(mask), axes))
    logps, _ = jax.jit(lambda model, batch: token_logps(model, batch, temperature=TEMPERATURE))(llama, batch)
    recorded = np.concatenate([row[:length] for row, length in zip(found.logps, lengths, strict=True)])
    np.testing.assert_allclose(np.asarray(logps.array)[mask > 0], recorded, atol=1e-5)


@pytest.mark.slow
def test_recorded_probabilities_are_those_of_the_distribution_that_was_sampled(llama, as_inputs, logits_of):
    """With filters, which a forward pass of the text and `TokenDistribution`, compared with transformers elsewhere, give."""
    sampling = Sampling(TEMPERATURE, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.4)
    found = sampled(llama, range(12), sampling=sampling)
    whole = np.zeros((12, 24), np.int32)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, found.tokens, strict=False)):
        text = [*prompt, *tokens[tokens >= 0]]
        whole[row, : len(text)] = text
    logits = np.asarray(logits_of(llama, as_inputs(whole)))
    filtered = jax.jit(lambda logits, seen: jax.nn.log_softmax(sampling.numbers.logits(logits[None], seen[None]))[0])
    for row, (prompt, tokens, logps) in enumerate(zip(PROMPTS, found.tokens, found.logps, strict=False)):
        expected = []
        for at in range(len(prompt), len(prompt) + (tokens >= 0).sum()):
            seen = np.isin(np.arange(logits.shape[-1]), whole[row, :at])
            expected.append(np.asarray(filtered(logits[row, at - 1], seen))[whole[row, at]])
        np.testing.assert_allclose(logps[: len(expected)], expected, atol=1e-5)
    assert np.any(found.tokens != sampled(llama, range(12)).tokens)


@pytest.mark.slow
def test_a_row_depends_on_its_number_and_not_on_the_others(llama):
    together = sampled(llama, range(8))
    for rows in ([3], [6, 1]):
        part = sampled(llama, rows)
        np.testing.assert_array_equal(part.tokens, together.tokens[rows])
        np.testing.assert_allclose(part.logps, together.logps[rows], atol=1e-5)
    again = sampled(llama, range(8))
    np.testing.assert_array_equal(again.tokens, together.tokens)
    np.testing.assert_array_equal(again.logps, together.logps)
    for noise in (Noise(6, 2), Noise(5, 3), Noise(5, 2, 1)):
        assert np.any(sampled(llama, range(8), noise=noise).tokens != together.tokens)


def test_the_cache_has_the_dtype_of_the_keys(llama):
    """Not of whichever parameter comes first."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), llama)
    keys = lambda model: jax.eval_shape(cache_of, model).stacks[0].keys.values.dtype  # noqa: E731
    cache_of = lambda model: model.init_cache(hax.Axis("batch", 1), 4, activation_dtype(model))  # noqa: E731
    assert activation_dtype({"a": jnp.zeros(1, jnp.bfloat16), "model": wide}) == jnp.float32
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    assert (keys(wide), keys(narrow)) == (jnp.float32, jnp.bfloat16)


DIFFERENT = {
    "dropout of the model": (Gpt2Config(**SMALL, resid_pdrop=0.1), None, "it is random"),
    "dropout of the attention": (Gpt2Config(**SMALL, attn_pdrop=0.1), None, "it is random"),
    "dropout of adapters": (
        LlamaConfig(**SMALL, num_kv_heads=2),
        LoraConfig(target="attn", dropout=0.1),
        "it is random",
    ),
    "fp8": (LlamaConfig(**SMALL, num_kv_heads=2), Fp8Config(min_features=16), "multiplies in fp8"),
    "adapters": (LlamaConfig(**SMALL, num_kv_heads=2), LoraConfig(target="attn"), None),
    "gpt2": (Gpt2Config(**SMALL), None, None),
    "experts": (MixtralConfig(**SMALL, num_kv_heads=2), None, None),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_only_a_training_step_does_is_refused_beside_a_sampler(name):
    config, surgery, said = DIFFERENT[name]
    key = jax.random.PRNGKey(0)
    model = jax.eval_shape(lambda: config.build(vocab_axis(64), key=key))
    model = model if surgery is None else jax.eval_shape(lambda model: surgery.apply(model, key=key), model)
    with contextlib.nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_samples_as_trained(model)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [pytest.param({}, marks=pytest.mark.soak), {"model": 2}], ids=str)
def test_a_mesh_samples_the_same_tokens(llama, shards):
    alone, where = sampled(llama, range(20)), layout(**shards)
    with where.use():
        placed = jax.tree.map(
            lambda a: hax.NamedArray(jax.device_put(a.array, where.parameter_sharding(a.axes)), a.axes),
            llama,
            is_leaf=lambda a: isinstance(a, hax.NamedArray),
        )
        found, forecast = sampled(placed, range(20)), sampled_by_compiled_programs(placed, PROMPTS[:20])
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    np.testing.assert_allclose(found.logps, alone.logps, atol=1e-5)
    np.testing.assert_array_equal(forecast, found.tokens)


def sampled_by_compiled_programs(model, prompts):
    """The tokens from the programs that a forecast compiles, from shapes alone, for 64 rows."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), model)
    programs = responses.compile_sampling(shapes, 64, 9, MOST, Sampling())
    keys = NOISE.keys(range(len(prompts)), 64)
    request = responses._request(model, prompts, keys, MOST, Sampling(TEMPERATURE), STOPS)
    state = programs.tokens(model, programs.prompts(model, request, None), request.draw, np.int32(MOST))
    cache = jax.tree.leaves(programs.cache)
    assert [leaf.shape for leaf in cache] == [a.shape for a in jax.tree.leaves(state.cache.stacks)]
    return np.asarray(state.written)[: len(prompts)]


class Fixed:
    """A model without a head, whose logits are its hidden states."""

    traits = ModelTraits()

    @staticmethod
    def lm_head():
        return None


@pytest.mark.slow
def test_draws_have_the_distribution_of_the_logits_at_a_temperature():
    """Chi-squared of 20,000 draws: 18.5 is exceeded by one in a thousand seeds."""
    number = 20_000
    rows = hax.Axis("batch", number)
    nothing = jnp.zeros(number, jnp.int32)
    state = decoding.DecodingState(
        None,
        token=nothing,
        positions=nothing,
        segment_ids=nothing + 1,
        alive=nothing == 0,
        written=nothing[:, None] - 1,
        step=jnp.int32(0),
        calls=None,
        seen=None,
        logps=jnp.zeros((number, 1)),
    )
    logits = hax.named(jnp.float32(VECTORS["logits"]), "vocab")
    final = logits.broadcast_to((rows, hax.Axis("position", 1), *logits.axes))
    keys = jax.random.split(jax.random.key(0), number)
    draw = decoding.Draw.of(keys, (4,), Sampling(VECTORS["temperature"]).numbers)
    after = decoding._with_next(Fixed, state, None, final, draw)
    expected = np.array(VECTORS["probabilities"])
    counts = np.bincount(np.asarray(after.token), minlength=5)
    assert ((counts - number * expected) ** 2 / (number * expected)).sum() < 18.5
    np.testing.assert_allclose(np.exp(after.logps[:, 0]), expected[np.asarray(after.token)], atol=1e-6)
    np.testing.assert_array_equal(np.asarray(after.alive), np.asarray(after.token) != 4)
