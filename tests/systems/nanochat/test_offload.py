"""Activations of nano in the host's memory."""

import pytest

from jaxlm.models.remat import RematConfig
from jaxlm.systems.nanochat.model import NanoConfig
from tests.models.test_offload import LAYERS, ROWS, TOKENS, saved

NANO = NanoConfig(seq_len=16, hidden_dim=32, num_layers=8, num_heads=4, num_kv_heads=2, smear_channels=24)


@pytest.mark.slow
def test_the_stream_of_nano_leaves_the_loop_for_the_host(gradient_of):
    """Its loop runs four layers in a turn, with windows of two sizes."""
    stream = (LAYERS, ROWS, TOKENS, NANO.hidden_dim)
    assert saved(*gradient_of(NANO, RematConfig(offload=["residual"]))) == ([stream] * 4, [])
