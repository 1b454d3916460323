"""What nano refuses, because its layers are not like those of others."""

import jax
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.evals.compare import CompareEvalConfig
from jaxlm.models.base import vocab_axis
from jaxlm.models.remat import RematConfig
from jaxlm.systems.nanochat.model import NanoConfig
from tests.engine.helpers import MODEL, VOCAB
from tests.models.test_layerwise import SIZES, filled, inputs, layer_streams
from tests.surgery.test_drop_layers import planned

NANO = NanoConfig(**SIZES)


@pytest.mark.slow
def test_layers_that_do_not_follow_one_another_are_refused():
    with pytest.raises(ConfigError, match="a model of type Nano has no layers that jaxlm can run one by one"):
        layer_streams(filled(NANO, 0), inputs(), "residual")


def test_layers_that_do_not_follow_one_another_are_not_compared():
    shapes = lambda config: jax.eval_shape(lambda: config.build(vocab_axis(VOCAB), key=jax.random.key(0)))  # noqa: E731
    nano = shapes(NanoConfig(seq_len=16, hidden_dim=32, num_layers=2, num_heads=4))
    with pytest.raises(ConfigError, match="a model of type Nano has no layers that jaxlm can run one by one"):
        CompareEvalConfig().check_model(nano, {"teacher": shapes(MODEL)})


def test_layers_are_not_dropped():
    model = {"type": "nano", "num_layers": 4, "num_heads": 4, "hidden_dim": 64}
    with pytest.raises(ConfigError, match="layers of nano depend on their number"):
        planned([{"type": "drop_layers", "layers": [1]}], model=model)


def test_modules_are_not_recomputed_one_by_one():
    with pytest.raises(ConfigError, match=r"modules given, but the layers of nano are checkpointed as a whole"):
        NanoConfig(gradient_checkpointing=RematConfig("mlp")).check()


def test_mlps_are_not_tiled():
    with pytest.raises(ConfigError, match=r"model\.mlp_tile_tokens: 8 given, but the MLPs of nano"):
        NanoConfig(mlp_tile_tokens=8).check()
