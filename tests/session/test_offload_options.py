"""What a run needs to offload activations: a compiler that reads them in the right order, and memory on the host."""

from unittest import mock

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.compilation import options
from jaxlm.session.compilation.options import check_offload, offload_options, step_options
from jaxlm.session.compilation.step import CompiledStep

SIZES = {"type": "llama", "seq_len": 64, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("platform", "remat", "version", "flags", "expected"),
    [
        ("gpu", {"offload": ["residual"]}, (0, 10, 2), "", "dynamic-slice-annotator"),
        (
            "gpu",
            {"offload": ["residual"]},
            (0, 11, 0),
            "--xla_disable_hlo_passes=cse,dce",
            "cse,dce,dynamic-slice-annotator",
        ),
        ("gpu", {"offload": ["residual"]}, (0, 11, 1), "", None),
        ("gpu", "full", (0, 10, 2), "", None),
        ("tpu", {"offload": ["residual"]}, (0, 10, 2), "", None),
    ],
)
def test_old_compilers_are_kept_from_reading_offloaded_layers_in_the_wrong_order(
    monkeypatch, platform, remat, version, flags, expected
):
    tree = {"model": SIZES | {"gradient_checkpointing": remat}, "trainer": {"train_batch_size": 8}}
    plan = make_plan(decode_run(ConfigSource(tree), "offloads"), "offloads", 64)
    monkeypatch.setattr(type(plan.layout), "platform", platform)
    monkeypatch.setattr("jaxlib.version.__version_info__", version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    options = step_options(plan).xla
    assert options.get("xla_disable_hlo_passes") == expected
    jax.jit(lambda x: x + 1).lower(1.0).compile(offload_options(plan))


@pytest.mark.slow
def test_gradients_of_the_wrong_layers_are_refused(monkeypatch):
    """As on a device: the test runs, and a compiler that reverses the layers fails it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    check_offload({})
    right = options._gradient
    monkeypatch.setattr(
        options, "_gradient", lambda policy, options: right(policy, options)[:: 1 if policy == "full" else -1]
    )
    with pytest.raises(
        ConfigError, match=r"gradient_checkpointing\.offload: on this device, .* wrong gradients .* set .*: full"
    ):
        check_offload({})
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    check_offload({})


def test_the_gradients_of_the_test_tell_layers_apart():
    layers = options._gradient("full", {})
    assert not np.allclose(layers, layers[::-1], rtol=0.1)


def test_more_than_the_host_has_is_refused(monkeypatch):
    monkeypatch.setattr("jaxlm.session.compilation.step.host_memory", lambda: 8 << 30)
    step = lambda num_bytes: CompiledStep(mock.Mock(), mock.Mock(), "", 1.0, 1, 1 << 30, False, "", num_bytes)  # noqa: E731
    step((8 << 30) // jax.local_device_count()).check_fits_memory()
    with pytest.raises(
        ConfigError, match=r"needs 16\.000 GiB of the host's memory .* machine has 8\.000 GiB\. Offload less: model"
    ):
        step((16 << 30) // jax.local_device_count()).check_fits_memory()
