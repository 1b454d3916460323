"""Which arrays of the models of systems are matrices to optimizers that have groups of their own for these."""

from typing import Any

import pytest

from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from tests.fields.trees import BASES, CORE_MODELS, MODELS, merged, tree
from tests.optim.test_groups import check_declared, check_matrices


@pytest.mark.parametrize("kind", [name for name in MODELS if name not in CORE_MODELS])
def test_matrices_of_our_models_are_their_linear_layers(kind):
    check_matrices(MODELS[kind])


def adapted(model: str) -> Any:
    lora = {"type": "lora", "rank": 2, "use_dora": True, "embeddings": "tokens|head"}
    return tree(model, phases=[{"name": "p", "surgery": [lora]}])


CHANGED = {
    **{name: BASES[name] for name in ("grow", "denoisers", "decouple", "reward", "fp8", "lookup", "timed stacks")},
    "time table": merged(BASES["timed"], {"model": {"time_embedding": {"type": "learned", "num_time_steps": 4}}}),
    "dba": merged(tree("dba"), {"model": {"gate": "dynamic", "null_slot": True}}),
    **{f"dora {name}": adapted(name) for name in ("llama", "qwen2_moe", "nano", "topology")},
}


@pytest.mark.parametrize("name", CHANGED)
def test_every_parameter_of_a_changed_model_is_declared(name):
    plan = make_plan(decode_run(ConfigSource(CHANGED[name]), None), "x", 64)
    check_declared(plan.state_builder.abstract_state(plan.phases[-1]).model)
