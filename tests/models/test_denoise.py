"""Generation by filling in masks, against a plain loop with numpy."""

import argparse
import dataclasses

import equinox as eqx
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.models.inference.denoise import DenoisingConfig, denoise_tokens
from jaxlm.models.inference.generate import generate
from jaxlm.models.inference.sampling import Sampling
from jaxlm.session.generation_options import add_denoising_options, denoising_of
from tests.engine.helpers import layout

MASK, GREEDY = 39, Sampling(temperature=0.0)
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model(request):
    from tests.models.conftest import TINY, _built

    return _built(dataclasses.replace(TINY["llama"], use_bidirectional_attention=True))


def by_hand(model, logits_of, as_inputs, prompt, num_new, config):
    """LLaDA's greedy sampler (Nie et al. 2025, algorithm 5), for one prompt, with the model alone in its row."""
    row = np.array([*prompt, *[MASK] * num_new])
    for block, count in config.passes(num_new):
        logits = np.asarray(logits_of(model, as_inputs(row[None])))[0].astype(np.float64)
        logits[:, MASK] = -np.inf
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        size = config.block_length or num_new
        first = len(prompt) + block * size
        places = [p for p in range(first, min(first + size, len(row))) if row[p] == MASK]
        best = sorted(places, key=lambda p: -probabilities[p].max())[:count]
        row[best] = probabilities[best].argmax(-1)
    return row[len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        DenoisingConfig(),
        DenoisingConfig(num_steps=3),
        DenoisingConfig(num_steps=6, block_length=4),
    ],
)
def test_greedy_tokens_are_those_of_the_published_algorithm(model, logits_of, as_inputs, config):
    found = denoise_tokens(model, PROMPTS, 10, MASK, GREEDY, config)
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert row == by_hand(model, logits_of, as_inputs, prompt, 10, config)
        assert len(row) == 10
        assert MASK not in row


@pytest.mark.slow
def test_sampled_rows_depend_on_their_prompt_and_the_seed_alone(model):
    config, warm = DenoisingConfig(remasking="random"), Sampling(temperature=1.0, top_k=20)
    draw = lambda prompts, seed=0: denoise_tokens(model, prompts, 8, MASK, warm, config, seed=seed)  # noqa: E731
    rows = draw(PROMPTS)
    assert draw([PROMPTS[1], PROMPTS[0]]) == rows[::-1]
    assert draw(PROMPTS, seed=1) != rows
    assert all(MASK not in row for row in rows)
    assert draw([[], [3]])[0] != [], "a text from nothing"


@pytest.mark.slow
def test_the_mask_is_never_emitted_even_if_it_is_the_most_likely_token(model):
    weight = model.head.weight
    biased = eqx.tree_at(lambda m: m.head.weight.array, model, weight.array.at[MASK].set(50.0))
    for temperature in (0.0, 2.0):
        (row,) = denoise_tokens(
            biased, [[1]], 16, MASK, Sampling(temperature=temperature), DenoisingConfig(num_steps=2)
        )
        assert MASK not in row


@pytest.mark.slow
def test_eight_devices_generate_what_one_does(model):
    config = DenoisingConfig(num_steps=4)
    alone = denoise_tokens(model, PROMPTS, 8, MASK, GREEDY, config)
    with layout(model=2).use():
        assert denoise_tokens(model, PROMPTS, 8, MASK, GREEDY, config) == alone


def test_passes_divide_the_tokens():
    assert DenoisingConfig().passes(3) == [(0, 1)] * 3
    assert DenoisingConfig(num_steps=2).passes(5) == [(0, 2), (0, 3)]
    assert DenoisingConfig(num_steps=4, block_length=4).passes(10) == [(0, 4), (1, 2), (1, 2), (2, 2)]
    for num_new in (1, 7, 10):
        for length in (1, 3, 10):
            blocks = -(-num_new // min(length, num_new))
            for num_steps in range(blocks, num_new + 1):
                passes = DenoisingConfig(num_steps=num_steps, block_length=length).passes(num_new)
                assert len(passes) == num_steps
                filled = np.bincount([block for block, _ in passes], [count for _, count in passes])
                assert filled.sum() == num_new
                assert (filled[:-1] == length).all()
    with pytest.raises(ConfigError, match=r"num_steps: 2 given for 10 new tokens in 3 blocks\. Expected 3 to 10"):
        DenoisingConfig(num_steps=2, block_length=4).passes(10)


def test_what_cannot_be_generated_is_refused(model, built, tiny_llama):
    run = lambda *args, **keys: denoise_tokens(*args, GREEDY, DenoisingConfig(), **keys)  # noqa: E731
    with pytest.raises(ConfigError, match=r"^denoising given, but this model predicts next tokens, .* Remove it$"):
        run(built(tiny_llama), [[1]], 4, MASK)
    with pytest.raises(ConfigError, match=r"^schedule: depth given, but this model predicts .* Remove schedule$"):
        denoise_tokens(built(tiny_llama), [[1]], 4, MASK, GREEDY, DenoisingConfig(schedule="depth"))
    with pytest.raises(ConfigError, match="tokenizer names no mask token"):
        run(model, [[1]], 4, None)
    with pytest.raises(ConfigError, match=r"prompt 1 has ids outside .* or the mask token \(39\)"):
        run(model, [[1], [MASK]], 4, MASK)
    with pytest.raises(ConfigError, match=r"exceed the model's seq_len of 32\. .* max_new_tokens to at most 12$"):
        run(model, [[1] * 20], 13, MASK)
    with pytest.raises(ConfigError, match=r"exceed the model's seq_len of 32\. Shorten the prompt$"):
        run(model, [[1] * 32], 1, MASK)
    with pytest.raises(ConfigError, match=r"^max_new_tokens: -1 given, 0 or more expected"):
        run(model, [[1]], -1, MASK)
    with pytest.raises(ConfigError, match="tokens are filled in in any order"):
        denoise_tokens(model, [[1]], 4, MASK, Sampling(repetition_penalty=1.2), DenoisingConfig())
    with pytest.raises(ConfigError, match="cannot generate token by token with a KV cache"):
        generate(model, [[1, 2]], max_new_tokens=4)


def test_an_option_out_of_range_is_named_as_it_is_written():
    parser = argparse.ArgumentParser()
    add_denoising_options(parser)
    with pytest.raises(ConfigError, match=r"^--num_steps: 0 given, an integer of 1 or more"):
        denoising_of(parser.parse_args(["--num_steps", "0"]))
