"""The remat policies of `gradient_checkpointing`."""

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.tracing import tracing
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.models.flops import matrix_operations
from jaxlm.models.remat import CANDIDATES, RematConfig, RematModules, RematOffload, parse_remat


@pytest.mark.parametrize(
    ("value", "remat_policy"),
    [
        (True, "full"),
        (False, "none"),
        ("cheap", "cheap"),
        ("attention", "attention"),
        ("auto", "auto"),
        ("none", "none"),
        (["query", "mlp"], ("query", "mlp")),
        (RematConfig("mlp"), RematModules("mlp")),
        (RematConfig(), "full"),
        (RematConfig(save=["mlp"]), ("mlp",)),
        (RematConfig(save=["mlp"], offload=["residual"]), RematOffload(("mlp",), ("residual",))),
    ],
)
def test_settings_are_parsed(value, remat_policy):
    assert parse_remat(value) == remat_policy
    hash(Gpt2Config(gradient_checkpointing=value))


@pytest.mark.parametrize(("value", "message"), [("some", "'some' given"), (["mpl"], "'mpl' given"), ([], "empty list")])
def test_invalid_settings_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        Gpt2Config(gradient_checkpointing=value)


@pytest.mark.slow
def test_only_the_modules_that_match_are_recomputed(tiny_llama, gradient_of):
    """In matrix products of the traced program, and in the memory of the compiled one."""
    config = tiny_llama
    policies = {
        "none": "none",
        "mlp": RematConfig("^mlp$"),
        "attn": RematConfig("attn$"),
        "both": RematConfig("^attn$|^mlp$"),
        "norms": RematConfig("norm"),
        "full": "full",
    }
    traced = {name: gradient_of(config, policy) for name, policy in policies.items()}
    jaxprs = {name: jax.make_jaxpr(gradient)(weights) for name, (gradient, weights) in traced.items()}
    operations = {name: matrix_operations(jaxpr.jaxpr) for name, jaxpr in jaxprs.items()}
    tokens, layers, width = 4 * 16, config.num_layers, config.hidden_dim
    # The last product of a module is not needed again.
    mlp = 2 * tokens * width * (2 * config.intermediate_dim) * layers
    projections = 2 * tokens * width * (width + 2 * config.num_kv_heads * (width // config.num_heads)) * layers
    recomputed = {name: count - operations["none"] for name, count in operations.items()}
    assert recomputed["norms"] == 0
    assert recomputed["mlp"] == mlp
    assert recomputed["attn"] >= projections
    assert recomputed["both"] == recomputed["mlp"] + recomputed["attn"]
    temporary = {
        name: gradient.lower(weights).compile().memory_analysis().temp_size_in_bytes
        for name, (gradient, weights) in traced.items()
        if name in ("none", "mlp", "both")
    }
    assert temporary["both"] < temporary["mlp"] < temporary["none"]
    whole, some = (traced[name][0](traced[name][1]) for name in ("none", "both"))
    for ours, theirs in zip(jax.tree.leaves(some), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_modules_of_gpt2_unrolled(gradient_of):
    """Its attention reads the width of a head from a module."""
    sizes = {"seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "scan_layers": False}
    config = Gpt2Config(**sizes, scale_attn_by_inverse_layer_idx=True)
    traced = [gradient_of(config, policy) for policy in ("none", RematConfig("attn|mlp"))]
    whole, some = (jax.tree.leaves(gradient(weights)) for gradient, weights in traced)
    for ours, theirs in zip(some, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    programs = [step.lower(weights).compile().as_text().count(" dot(") for step, weights in traced]
    assert programs[0] < programs[1], "XLA does not merge the recomputation with the forward pass"


def test_modules_that_match_nothing_are_refused(tiny_llama, gradient_of):
    gradient, weights = gradient_of(tiny_llama, RematConfig("mpl"))
    message = (
        r"gradient_checkpointing\.modules: 'mpl' matches no module of a layer\. A layer has: attn_norm, attn, .*mlp"
    )
    with pytest.raises(ConfigError, match=message):
        gradient.lower(weights)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing\.modules: '\(' is not a valid regular expression"):
        RematConfig("(")


@pytest.mark.slow
def test_auto_compiles_like_the_policy_it_chose(tiny_llama, built, as_inputs):
    inputs = as_inputs([[1] * 16])

    def program(remat_policy):
        model = built(tiny_llama)
        with tracing(auto_remat=remat_policy):
            gradient = jax.grad(lambda model: model.hidden(inputs).final.array.sum())
            return jax.jit(gradient).lower(model).compile().memory_analysis().temp_size_in_bytes

    sizes = [program(remat_policy) for remat_policy in CANDIDATES["gpu"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(CANDIDATES["gpu"])


def test_the_backward_pass_with_saved_attention_multiplies_no_scores_again(tiny_llama, gradient_of):
    """In matrix products of the traced program: `full` executes attention's forward pass once more."""

    def operations(policy):
        gradient, weights = gradient_of(tiny_llama, policy)
        return matrix_operations(jax.make_jaxpr(gradient)(weights).jaxpr)

    rows, tokens, head_size = 4, 16, tiny_llama.hidden_dim // tiny_llama.num_heads
    scores_and_sums = 2 * 2 * rows * tokens**2 * tiny_llama.num_heads * head_size * tiny_llama.num_layers
    full, saved = operations("full"), operations("attention")
    assert full - saved == scores_and_sums
    assert operations(["attention"]) == saved
