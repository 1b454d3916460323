"""nano as the tests of all models train it: sums in bfloat16, and noise on embeddings."""

import pytest

from jaxlm.systems.nanochat.model import NanoConfig
from tests.models import test_bfloat16
from tests.objectives import test_neftune


@pytest.mark.soak
def test_no_sum_over_tokens_loses_terms():
    sizes = test_bfloat16.SIZES | {"num_layers": 4}
    test_bfloat16.check_sums(NanoConfig(**sizes, num_kv_heads=2, smear_channels=24, backout=0.2))


@pytest.mark.slow
def test_only_training_has_noise_and_a_model_that_cannot_add_it_is_refused():
    test_neftune.check_noise(NanoConfig(**test_neftune.SIZES))
