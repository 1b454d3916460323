"""Surgeries of nano: windows, adapters and layers in fp8."""

import equinox as eqx
import jax
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.models.base import vocab_axis
from jaxlm.plan.plan import make_plan
from jaxlm.surgery.fp8 import describe_products
from jaxlm.surgery.lora import LoraConfig
from jaxlm.systems.nanochat.model import NanoConfig
from tests.surgery.test_extend_context import SIZES, decoded, models
from tests.surgery.test_fp8 import in_fp8
from tests.surgery.test_lora import adapted


def test_windows_of_nano_grow_with_its_context():
    before, after = models({"seq_len": 64, "rope": {"theta": 1e6}}, model={"type": "nano", **SIZES})
    assert [kind.window for kind in before.kinds] == [17, 17, 17, None]
    assert [kind.window for kind in after.kinds] == [33, 33, 33, None]
    plan = make_plan(decoded({"seq_len": 64, "rope": {"theta": 1e6}}, model={"type": "nano", **SIZES}), "x", 61)
    body = plan.state_builder.abstract_state(plan.phases[1]).model.body
    assert (body.kinds, body.seq_len) == (after.kinds, 64)


def test_nanochat_at_depth_24_has_its_authors_number_of_layers():
    config = NanoConfig(num_layers=24, hidden_dim=1536, num_heads=12)
    found = describe_products(in_fp8(config, 32_768))
    assert found == "145 linear layers in fp8 (tensorwise), 12 in the compute dtype"  # its log, of the same depth


def test_layers_that_are_stacked_beside_the_others_are_no_head():
    """The gates of value embeddings, of which not every layer has one."""
    nano = NanoConfig(seq_len=16, hidden_dim=64, num_layers=3, num_heads=2)
    abstract = jax.eval_shape(lambda: nano.build(vocab_axis(64), key=jax.random.key(0)))
    config = {"target": "value_gates", "dropout": 0.5, "rank": 4}
    changed = eqx.filter_eval_shape(lambda model: adapted(model, **config), abstract)
    axes = {
        path: tuple(axis.name for axis in leaf.axes) for path, leaf in tree.leaves(changed) if "value_gates" in path
    }
    assert axes["body.value_gates.a"] == ("value_layers", "lora_rank", "gate_channels")
    assert axes["body.value_gates.b"] == ("value_layers", "kv_heads", "lora_rank")
    merged = eqx.filter_eval_shape(LoraConfig(**config).merge, changed)
    assert jax.tree.structure(merged) == jax.tree.structure(abstract)
    with pytest.raises(ConfigError, match=r"head gets an adapter\. The loss reads its weight directly"):
        eqx.filter_eval_shape(lambda model: adapted(model, target="value_gates|head", dropout=0.5), abstract)
