"""Activations in the host's memory: what leaves the loop over the layers, and for which memory.

The program that XLA makes for CPUs has one memory. So these tests read the traced program and the one lowered for CUDA; that
the compiler for GPUs keeps both apart is shown where it is installed (tests/systems/forecast/test_forecast_run.py).
"""

import re

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.models.remat import RematConfig, RematOffload
from jaxlm.models.scan import runs_as_scan

ROWS, TOKENS, LAYERS = 4, 16, 2


def loops(jaxpr):
    """The scans of a program, in order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from loops(inner)


def saved(gradient, weights):
    """What the first loop with one turn per layer stacks: the shapes in the host's memory, and in the device's."""
    jaxpr = jax.make_jaxpr(gradient)(weights).jaxpr
    loop = next(loop for loop in loops(jaxpr) if loop.params["length"] == LAYERS)
    outs = zip(loop.outvars, loop.params["jaxpr"].out_avals, strict=True)
    stacked = [out.aval for out, of_turn in outs if out.aval.ndim > of_turn.ndim]
    on_host = [aval.shape for aval in stacked if aval.memory_space == jax.memory.Space.Host]
    return on_host, [aval.shape for aval in stacked if aval.memory_space != jax.memory.Space.Host]


@pytest.mark.slow
def test_the_stream_and_attention_leave_the_loop_for_the_host_and_nothing_stays(tiny_llama, gradient_of):
    heads, width = tiny_llama.num_heads, tiny_llama.hidden_dim
    stream = (LAYERS, ROWS, TOKENS, width)
    groups = (LAYERS, ROWS, tiny_llama.num_kv_heads, heads // tiny_llama.num_kv_heads, TOKENS)
    attention = [(*groups, width // heads), groups]
    gradient, weights = gradient_of(tiny_llama, RematConfig(offload=["residual", "attention"]))
    assert saved(gradient, weights) == ([stream, *attention], [])
    text = gradient.trace(weights).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r'_xla_buffer_placement = "pinned_host"', text)) == 3
    assert saved(*gradient_of(tiny_llama, RematConfig(save=["attention"], offload=["residual"]))) == (
        [stream],
        attention,
    )
    assert saved(*gradient_of(tiny_llama, ["attention"])) == ([], [*attention, stream])


def test_layers_that_offload_run_in_a_loop():
    """On one GPU they are otherwise unrolled, and the compiler copies back what was offloaded at once."""
    looped = {
        policy: runs_as_scan("auto", 8, policy, platform="gpu", num_devices=1)[0]
        for policy in ("full", RematOffload((), ("residual",)))
    }
    assert [*looped.values()] == [False, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload": ["residual"], "save": ["mpl"]}, r"gradient_checkpointing\.save: 'mpl' given"),
        ({"offload": ["stream"]}, r"gradient_checkpointing\.offload: 'stream' given\. Activations .*: residual, query"),
        ({"save": ["residual"], "offload": ["mlp"]}, r"gradient_checkpointing\.save: 'residual' given"),
        ({"save": ["mlp"], "offload": ["mlp"]}, r"gradient_checkpointing\.offload: 'mlp' is in save too"),
        ({"offload": ["mlp", "mlp"]}, r"gradient_checkpointing\.offload: mlp, mlp given\. Remove"),
        ({"modules": "mlp", "offload": ["residual"]}, r"gradient_checkpointing\.modules: given together with save"),
    ],
)
def test_unknown_and_contradictory_activations_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        RematConfig(**given)


def test_layers_that_are_compiled_separately_do_not_offload():
    with pytest.raises(ConfigError, match=r"model\.scan_layers: false given, but outside a loop"):
        Gpt2Config(gradient_checkpointing=RematConfig(offload=["residual"]), scan_layers=False)
