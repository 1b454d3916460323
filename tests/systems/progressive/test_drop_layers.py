"""Layers that are dropped from a model whose layers are cut into stacks."""

import pytest

from jaxlm.core.errors import ConfigError
from tests.surgery.test_drop_layers import planned


def test_split_layers_cannot_be_dropped():
    with pytest.raises(ConfigError, match="split_at has cut the layers into stacks before"):
        planned([{"type": "split_at", "layer": 2}, {"type": "drop_layers", "layers": [1]}])
