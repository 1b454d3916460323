"""Compiler options: those of the table exist, and the user's own win."""

import re
import subprocess
import sys

import pytest

from jaxlm.core.xla_options import TABLE, compiler_options


@pytest.mark.parametrize("platform", TABLE)
def test_the_users_flags_win(platform, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options(platform) == TABLE[platform]
    flags = [f"--{name}=false" for name in TABLE[platform]]
    monkeypatch.setenv("XLA_FLAGS", " ".join([*flags, "--xla_force_host_platform_device_count=1"]))
    assert compiler_options(platform) == {}


def test_every_option_exists():
    """The compiler lists what it knows, those of GPUs too."""
    ask = "import os; os.environ['XLA_FLAGS'] = '--help'; import jax; jax.devices()"
    listed = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    known = set(re.findall(r"--(xla_\w+)", listed.stdout + listed.stderr))
    assert "xla_cpu_enable_fast_math" in known
    assert {name for platform in ("cpu", "gpu") for name in TABLE[platform]} <= known
