"""Cuts of layers that are spread over devices."""

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from tests.session.test_mesh_plan import MODEL

CUT = r"phase 'train': after its surgery, the axis 'layers' of body\.0\..* has 1 entries, .* the 2 devices"


@pytest.mark.parametrize("key", ["axis_resources", "parameter_axis_resources", "compute_axis_resources"])
def test_a_cut_that_does_not_divide_over_the_devices_of_its_layers_is_refused(key):
    """The whole stack of 4 divides over 2 devices; stacks of 1 and 3 do not, and stacks of 2 and 2 do."""

    def cut_at(layer):
        sections = {"phases": [{"name": "train", "surgery": [{"type": "split_at", "layer": layer}]}]}
        model = {**MODEL, "num_kv_heads": 4, "num_layers": 4}
        trainer = {"train_batch_size": 16, "model_axis_size": 2, key: {"layers": "model"}}
        if key == "parameter_axis_resources":
            trainer["tensor_parallel_axes"] = ["mlp"]
        return make_plan(decode_run(ConfigSource({"model": model, "trainer": trainer, **sections}), None), "x", 64)

    with pytest.raises(ConfigError, match=CUT):
        cut_at(1)
    assert cut_at(2).layout.mesh.shape["model"] == 2
