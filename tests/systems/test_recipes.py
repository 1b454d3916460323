"""Recipes of systems are copied with what they include, and read without starting a device."""

import subprocess
import sys
import textwrap

import pytest

from jaxlm.reading.recipes import recipes_command
from jaxlm.reading.yaml import load_yaml

READ = """
    from jaxlm.plan.load_config import load_config
    for name in ("upcycle/dba", "upcycle/gqa"):  # surgeries, which say how they change the model
        load_config(["--config_path", f"jaxlm:{name}.yaml", "--use_hf_model_config", "false"], "jaxlm.train")
    from jax._src import xla_bridge
    print(xla_bridge.backends_are_initialized())
"""


def test_a_recipe_in_a_folder_is_copied_with_what_it_includes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipes_command(["nanochat/cpu_d4"]) == 0
    assert load_yaml("cpu_d4.yaml").tree == load_yaml("jaxlm:nanochat/cpu_d4").tree


@pytest.mark.slow
def test_recipes_start_no_device(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(READ)]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "False\n"
