"""Which arrays of the models of systems are matrices to optimizers that have groups of their own for these."""

import pytest

from tests.fields.trees import CORE_MODELS, MODELS
from tests.optim.test_groups import check_matrices


@pytest.mark.parametrize("kind", [name for name in MODELS if name not in CORE_MODELS])
def test_matrices_of_our_models_are_their_linear_layers(kind):
    check_matrices(MODELS[kind])
