"""Responses that a sampler writes."""

import gc

import jax
import numpy as np
import pytest

from jaxlm.core.precision import FLOAT32, PrecisionConfig, PrecisionRuleConfig, parse_precision
from jaxlm.core.tracing import BlockSizes, trace_options
from jaxlm.models.inference.responses import Responses
from jaxlm.models.inference.sampling import Sampling
from jaxlm.systems.rl import samplers
from jaxlm.systems.rl.samplers import LocalSamplerConfig, SamplerContext, SamplingRequest
from tests.engine.helpers import layout
from tests.models.test_responses import (
    MOST,
    NOISE,
    PROMPTS,
    STOPS,
    TEMPERATURE,
    llama,  # noqa: F401 - a fixture
    sampled,
)

NOTHING = Responses(np.full((1, 1), 3), np.zeros((1, 1)))


@pytest.mark.slow
def test_other_programs_sample_the_same_tokens(llama):  # noqa: F811
    """Fewer rows, fewer tokens, and calls of at most 16 rows that are sorted by length."""
    together = sampled(llama)
    fewer = sampled(llama, range(5), num_rows=None)
    np.testing.assert_array_equal(fewer.tokens, together.tokens[:5])
    np.testing.assert_array_equal(sampled(llama, most=5).tokens, together.tokens[:, :5])
    sampler = LocalSamplerConfig(max_rows=16).open(SamplerContext(layout(), FLOAT32, print))
    request = SamplingRequest(NOISE.step, NOISE.seed, range(40), MOST, Sampling(TEMPERATURE), STOPS)
    for sample, tokens in zip(sampler.sample(llama, PROMPTS[:40], request), together.tokens, strict=False):
        assert [*sample.tokens, *[-1] * (MOST - len(sample.tokens))] == tokens.tolist()
        assert sample.is_finished == (sample.tokens[-1] in STOPS)


def test_weights_that_have_the_compute_dtype_are_not_copied(llama):  # noqa: F811
    rules = [PrecisionRuleConfig(match="embed|tokens", params="float32", compute="float32")]
    precision = parse_precision(PrecisionConfig(default="p=f32,c=bfloat16", rules=rules))
    sampler = LocalSamplerConfig().open(SamplerContext(layout(), precision, print))
    cast, expected = sampler._cast(llama), precision.cast_to_compute(llama)  # type: ignore[attr-defined]
    assert jax.tree.structure(cast) == jax.tree.structure(expected)
    kept = set()
    for own, found, want in zip(*map(jax.tree.leaves, (llama, cast, expected)), strict=True):
        np.testing.assert_array_equal(found, want, strict=True)
        assert (found is own) == (own.dtype == want.dtype)
        kept.add(found is own)
    assert kept == {True, False}


def test_programs_are_compiled_with_the_options_and_sizes_of_the_step(llama, monkeypatch):  # noqa: F811
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        sampled(llama, xla_options=(("xla_no_such_option", True),))
    seen = []
    monkeypatch.setattr(
        samplers, "sample_responses", lambda *args, **keys: seen.append((trace_options(), keys)) or NOTHING
    )
    context = SamplerContext(layout(), FLOAT32, print, xla_options=(("a", 1),), block_sizes=BlockSizes(8))
    request = SamplingRequest(0, 0, range(1), MOST, Sampling(TEMPERATURE), STOPS)
    LocalSamplerConfig().open(context).sample(llama, PROMPTS[:1], request)
    ((options, keys),) = seen
    assert (options.block_sizes, keys["xla_options"]) == (BlockSizes(8), (("a", 1),))


@pytest.mark.slow
def test_a_rollout_leaves_nothing_behind(llama):  # noqa: F811
    """`jax.eval_shape` leaves 50 objects in jax's caches for each call."""
    precision = parse_precision(PrecisionConfig(default="p=f32,c=bfloat16"))
    sampler = LocalSamplerConfig().open(SamplerContext(layout(), precision, print))
    request = SamplingRequest(NOISE.step, NOISE.seed, range(2), 2, Sampling(TEMPERATURE), STOPS)

    def held_after(calls: int) -> int:
        for _ in range(calls):
            sampler.sample(llama, PROMPTS[:2], request)
        gc.collect()
        return len(gc.get_objects())

    held_after(2)
    assert held_after(1) + 20 > held_after(20)
