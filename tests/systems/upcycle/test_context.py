"""Rows are shared for the key/value heads of all phases."""

import jax
import numpy as np

from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from tests.plan.test_context import MODEL


def test_rows_are_those_of_all_phases():
    phases = [{"name": "one"}, {"name": "two", "surgery": [{"type": "pool_kv_heads", "num_kv_heads": 1}]}]
    tree = {
        "model": {**MODEL, "num_kv_heads": 2, "type": "mistral", "sliding_window": 16},
        "trainer": {"train_batch_size": 16, "num_train_steps": 10, "context": {"size": 2}},
        "phases": [{**phase, "num_train_steps": 5} for phase in phases],
    }
    plan = make_plan(decode_run(ConfigSource(tree), None), "x", 64)
    assert (plan.context.method, plan.layout.context.work.windows) == ("gather", ((16, 4),))
    assert "1 key/value heads do not divide" in plan.context.reason
    assert jax.device_count() == np.prod(list(plan.layout.mesh.shape.values()))
