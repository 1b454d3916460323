"""Surgeries that look into attention: what they do with layers that are something else, and with heads that have a gate."""

from dataclasses import dataclass, replace

import jax
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.qwen3_5 import Qwen35Config
from jaxlm.models.linear import Linear
from jaxlm.systems.upcycle.decouple import DecoupleConfig
from jaxlm.systems.upcycle.pool_kv_heads import PoolKvHeadsConfig
from tests.models.recurrent import RecurrentConfig

SIZES = {"seq_len": 16, "hidden_dim": 16, "intermediate_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


@dataclass(frozen=True)
class GatedConfig(LlamaConfig):
    """A Llama whose attention has a gate, and neither norms nor other layers."""

    def attention(self, keys):
        gate = Linear.init(self.Embed, (self.Heads, self.HeadSize), std=0.1, key=keys[0])
        return replace(super().attention(keys), gate_proj=gate)


SURGERIES = {
    "decouple": DecoupleConfig(sem_dim=16, geo_dim=16),
    "pool": PoolKvHeadsConfig(num_kv_heads=1),
    "pool and align": PoolKvHeadsConfig(num_kv_heads=1, align=True),
}
MODELS = {
    "GatedDeltaNet": Qwen35Config(**SIZES, head_dim=8, attention_interval=2),
    "DecayingSum": RecurrentConfig(**SIZES),
    "have a gate": GatedConfig(**SIZES),
}


# Gates are of query heads, which pooling without turning leaves as they are.
REFUSED = [(name, reason) for name in SURGERIES for reason in MODELS if (name, reason) != ("pool", "have a gate")]


@pytest.mark.parametrize(("name", "reason"), REFUSED)
def test_what_is_more_than_attention_is_refused_by_name(name, reason):
    with pytest.raises(ConfigError, match=f"surgery .*: .*{reason}"):
        SURGERIES[name].changed(MODELS[reason])


@pytest.mark.slow
def test_a_gate_stays_when_key_value_heads_are_pooled():
    config, surgery = MODELS["have a gate"], SURGERIES["pool"]
    before = config.build(Axis("vocab", 8), key=jax.random.key(0))
    after = surgery.apply(before, key=jax.random.key(1))
    gates = [dict(tree.leaves(model))["body.layers.stacked.attn.gate_proj.weight"] for model in (before, after)]
    assert (gates[0] == gates[1]).all()
    assert after.config == surgery.changed(config)
