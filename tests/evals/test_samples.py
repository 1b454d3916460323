"""The evaluation `samples`: what it refuses at the start of a run."""

import dataclasses

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.evals.samples import SamplesEvalConfig
from jaxlm.models.families.llama import LlamaConfig
from jaxlm.models.inference.denoise import DenoisingConfig

CAUSAL = LlamaConfig(seq_len=32, hidden_dim=16, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=2)
BOTH = dataclasses.replace(CAUSAL, use_bidirectional_attention=True)


@pytest.mark.parametrize("model", [CAUSAL, BOTH], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_new_tokens": 0}, "needs at least one prompt, and max_new_tokens of at least 1"),
        ({"prompts": []}, "needs at least one prompt"),
        ({"temperature": 1e-30}, r": temperature: 1e-30 given, 0 \(greedy\) or 1e-20 to 1e\+20 expected"),
        ({"temperature": 1e30}, r": temperature: 1e\+30 given"),
    ],
)
def test_options_that_no_model_can_use_are_refused_before_a_run(model, keys, message):
    config = SamplesEvalConfig(**keys)
    for check in (config.check, lambda: config.check_model(model)):
        with pytest.raises(ConfigError, match=f"^evals: type samples{message}|^evals: type samples {message}"):
            check()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"repetition_penalty": 2.0},
            "repetition_penalty: 2.0 given, but a model whose tokens attend to later ones fills",
        ),
        ({"denoising": DenoisingConfig(num_steps=99)}, "denoising: num_steps: 99 given for 64 new tokens"),
    ],
)
def test_options_that_denoising_has_no_use_for_are_refused_before_a_run(keys, message):
    SamplesEvalConfig(repetition_penalty=2.0).check_model(CAUSAL)
    with pytest.raises(ConfigError, match=f"^evals: type samples: {message}"):
        SamplesEvalConfig(**keys).check_model(BOTH)


@pytest.mark.parametrize(
    ("longest", "fix"), [(20, "Shorten the prompt, or set max_new_tokens to 12$"), (40, "Shorten the prompt$")]
)
def test_a_prompt_that_is_too_long_gets_advice_that_works(longest, fix):
    with pytest.raises(ConfigError, match=fix):
        SamplesEvalConfig(max_new_tokens=16)._check_length(longest, 32)
