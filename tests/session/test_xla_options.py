"""Compiler options: those in the table exist, and the user's own take precedence."""

from pathlib import Path

import jax
import pytest

from jaxlm.session.compilation.options import TABLE, compiler_options
from jaxlm.surgery.fp8 import Fp8Config

OF_FP8 = {"xla_gpu_enable_triton_gemm": False}
ALL = [*TABLE.values(), OF_FP8]


@pytest.mark.parametrize("platform", TABLE)
def test_the_users_flags_take_precedence(platform, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options(platform) == TABLE[platform]
    flags = [f"--{name}=false" for name in TABLE[platform]]
    monkeypatch.setenv("XLA_FLAGS", " ".join([*flags, "--xla_force_host_platform_device_count=1"]))
    assert compiler_options(platform) == {}


@pytest.mark.parametrize(("platform", "more"), [("gpu", OF_FP8), ("cpu", {}), ("tpu", {})])
def test_a_surgery_adds_options_that_the_users_flags_override(platform, more, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options(platform, [Fp8Config()]) == TABLE[platform] | more
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert compiler_options(platform, [Fp8Config()]) == TABLE[platform]


def test_every_option_exists():
    """On every platform, the compiler knows the options of all platforms and refuses unknown names."""
    program = jax.jit(lambda x: x + 1).lower(1.0)
    for options in ALL:
        program.compile(options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        program.compile({"xla_gpu_enable_wishful_thinking": True})


def test_every_option_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "watch.md").read_text(encoding="utf-8")
    for options in ALL:
        for name, value in options.items():
            assert f"`{name}={str(value).lower()}`" in page
