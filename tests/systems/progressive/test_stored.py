"""Other surgeries beside a cut into stacks."""

import dataclasses

import jax

from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.surgery.base import merge_surgeries
from jaxlm.surgery.fp8 import Fp8Config, describe_products
from jaxlm.surgery.quantize import QuantizeConfig
from jaxlm.systems.progressive.surgery import SplitAtConfig
from tests.surgery.test_fp8 import KEY, SIZES, shapes
from tests.surgery.test_quantize import MODEL, applied, stored

THREE_LAYERS = dataclasses.replace(MODEL, num_layers=3)


def test_fp8_goes_with_a_cut_in_any_order():
    split = SplitAtConfig(1)
    plain = shapes(LlamaConfig(**SIZES))

    def applied(model, surgeries):
        for surgery in surgeries:
            model = surgery.apply(model, key=KEY)
        return model

    for surgeries in ([split, Fp8Config()], [Fp8Config(), split]):
        model = jax.eval_shape(lambda model, them=tuple(surgeries): applied(model, them), plain)
        assert "22 linear layers in fp8" in describe_products(model)
        merged = jax.eval_shape(lambda model, them=tuple(surgeries): merge_surgeries(model, them), model)
        assert jax.tree.structure(merged) == jax.tree.structure(plain)


def test_stacks_of_stored_weights():
    lower = stored(applied(SplitAtConfig(layer=2), QuantizeConfig(modules=r"body\.0\."), config=THREE_LAYERS))
    assert {path.split(".")[1] for path in lower} == {"0"}
    assert {weight.axis_size("layers") for weight in lower.values()} == {2}
    split_after = stored(applied(QuantizeConfig(), SplitAtConfig(layer=1), config=THREE_LAYERS))
    assert {weight.axis_size("layers") for weight in split_after.values()} == {1, 2}
