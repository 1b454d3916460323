"""Gemma 4 with layers that share keys and values, and read embeddings of their own. Numbers: tests/interop."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from jax.sharding import PartitionSpec

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.parameters import described
from jaxlm.interop.hf.families.gemma4 import Gemma4Config
from jaxlm.models.flops import matrix_operations
from tests.interop.cases import inputs_of, tokens

SIZES = {
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
}
CONFIG = Gemma4Config(
    **SIZES,
    seq_len=48,
    num_layers=8,
    num_global_kv_heads=1,
    sliding_window_pattern=2,
    num_kv_shared_layers=4,
    double_wide_mlp=True,
    layer_input_dim=6,
    attn_backend="reference",
    gradient_checkpointing="none",
)
VOCAB = Axis("vocab", 61)


def shapes_of(config):
    return jax.eval_shape(lambda: config.build(VOCAB, key=jax.random.key(0)))


@pytest.mark.slow
def test_flops_are_those_of_the_products_in_the_program():
    """Embeddings are looked up, and layers that take keys and values compute none."""

    def logits(model, inputs):
        return model.logits(model.hidden(inputs).final).array

    program = jax.make_jaxpr(logits)(shapes_of(CONFIG), inputs_of(tokens(rows=2, length=48)))
    assert 3 * matrix_operations(program.jaxpr) == 2 * 48 * CONFIG.flops_per_token(VOCAB.size).palm


def test_only_earlier_layers_have_a_cache():
    cache = jax.eval_shape(lambda model: model.init_cache(Axis("batch", 1), 16, jnp.float32), shapes_of(CONFIG))
    own = 2 * (2 * 8 + 16)  # keys and values: two local layers with two heads each, and two global ones with one
    assert cache.bytes_per_token == 2 * own * 4
    assert cache.bytes_per_row == 0


def test_the_table_is_sharded_and_trained_as_embeddings_are():
    model = shapes_of(CONFIG)
    axes = {axis.name: axis.size for _, leaf in tree.leaves(model) for axis in leaf.axes}
    layout = make_layout(mesh_shape(8), AxisMappings("batch", ("embed",), (), {}, {}), axes)
    assert layout.parameter_sharding(model.layer_inputs.table.axes).spec == PartitionSpec(None, "data")
    assert described(model)["layer_inputs.table"] == described(model)["tokens.weight"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_kv_shared_layers": 0}, "double_wide_mlp: true given without num_kv_shared_layers"),
        ({"num_kv_shared_layers": 7}, "no layer before the last 7 of 8 is global"),
        ({"num_kv_shared_layers": 9}, "no layer before the last 9 of 8 is global"),
    ],
)
def test_what_has_no_keys_and_values_to_read_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **keys).check()


@pytest.mark.parametrize("kept", [range(7), [*range(8), 7]])
def test_no_layer_is_taken_out_or_added(kept):
    with pytest.raises(ConfigError, match="they share keys and values"):
        CONFIG.with_layers(kept)


@pytest.mark.slow
def test_upper_layers_do_not_run_without_those_that_give_them_keys_and_values():
    model, inputs = shapes_of(CONFIG), inputs_of(tokens(rows=2, length=48))
    stream = jax.eval_shape(lambda model: model.hidden(inputs, taps=("layer_3",)).taps["layer_3"], model)
    with pytest.raises(ConfigError, match="reads the keys and values of an earlier one"):
        jax.eval_shape(lambda model, x: model.forward_layers(4, None, inputs, x).final, model, stream)
