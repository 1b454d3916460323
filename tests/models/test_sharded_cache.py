"""Generation from long prompts: devices divide the tokens of a prompt, and the slots of the KV cache."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxlm.core.sharding import ContextSharding, Layout
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import vocab_axis
from jaxlm.models.inference.generate import GenerationConfig, compile_generation, generate, generate_tokens
from jaxlm.models.inference.unstacked import Generator

LLAMA = LlamaConfig(seq_len=256, hidden_dim=64, intermediate_dim=96, num_layers=2, num_heads=8, num_kv_heads=4)
PROMPTS = [np.random.default_rng(n).integers(0, 64, size).tolist() for n, size in enumerate((150, 90))]
NUM_NEW = 20
METHODS = {"gather": 8, "ring": 4, "heads": 2}  # number of devices by method: programs are cached by mesh


@pytest.fixture(scope="module")
def model():
    return LLAMA.build(vocab_axis(64), key=jax.random.key(0))


def layout(method: str) -> Layout:
    context = ContextSharding(**{method: ("context",)})
    devices = np.asarray(jax.devices()[: METHODS[method]]).reshape(1, -1)
    mesh = Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    return Layout(mesh, {}, {"batch": "data", "position": context.axes, "key_position": context.axes}, context)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_devices_generate_what_one_device_does(model, method):
    expected = generate(model, PROMPTS, max_new_tokens=NUM_NEW, temperature=0.0)
    with (place := layout(method)).use():
        sharded = jax.device_put(model, place.replicated())
        assert generate(sharded, PROMPTS, max_new_tokens=NUM_NEW, temperature=0.0) == expected


@pytest.mark.slow
def test_int8_slots_are_divided_too(model):
    config = GenerationConfig(NUM_NEW, temperature=0.0, cache_dtype="int8")
    expected = generate_tokens(Generator.of(model), PROMPTS, config)
    with (place := layout("ring")).use():
        generator = Generator.of(jax.device_put(model, place.replicated()))
        assert generate_tokens(generator, PROMPTS, config) == expected


@pytest.mark.slow
def test_no_device_ever_holds_the_cache_of_all_layers(model):
    """Neither after the prompt, nor while it is written, nor when tokens are generated."""
    with (place := layout("gather")).use():
        generator = Generator.of(jax.device_put(model, place.replicated()))
        programs = compile_generation(generator, 2, 200, GenerationConfig(40, temperature=0.0))
    slots, entries = 320, 2 * 2 * 4 * 8  # of 2 rows and 4 heads with 8 features in 2 layers
    whole = 2 * 4 * entries * slots
    for program in programs:
        assert program.memory_analysis().output_size_in_bytes < 1.2 * whole / 8
        gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", program.as_text())
        sizes = [int(np.prod([int(size) for size in shape.split(",")])) for shape in gathered]
        assert max(sizes, default=0) <= entries // 2 * 256, "the keys of one layer"
