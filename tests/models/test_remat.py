"""The remat policies of `gradient_checkpointing`."""

import jax
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.tracing import tracing
from jaxlm.models.families.gpt2 import Gpt2Config
from jaxlm.models.remat import CANDIDATES, parse_remat


@pytest.mark.parametrize(
    ("value", "remat_policy"),
    [
        (True, "full"),
        (False, "none"),
        ("cheap", "cheap"),
        ("auto", "auto"),
        ("none", "none"),
        (["query", "mlp"], ("query", "mlp")),
    ],
)
def test_reads(value, remat_policy):
    assert parse_remat(value) == remat_policy
    hash(Gpt2Config(gradient_checkpointing=value))


@pytest.mark.parametrize(("value", "message"), [("some", "'some' given"), (["mpl"], "'mpl' given"), ([], "empty list")])
def test_refuses(value, message):
    with pytest.raises(ConfigError, match=message):
        Gpt2Config(gradient_checkpointing=value)


def test_auto_compiles_like_the_policy_it_chose(tiny_llama, built, as_inputs):
    inputs = as_inputs([[1] * 16])

    def program(remat_policy):
        model = built(tiny_llama)
        with tracing(auto_remat=remat_policy):
            gradient = jax.grad(lambda model: model.hidden(inputs).final.array.sum())
            return jax.jit(gradient).lower(model).compile().memory_analysis().temp_size_in_bytes

    sizes = [program(remat_policy) for remat_policy in CANDIDATES["gpu"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
