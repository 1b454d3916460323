"""The installed script `jaxlm` finds your own class in the folder where it is started, as `python -m jaxlm` does."""

import os
import subprocess
import sys

import pytest

from tests.end_to_end.commands import REPOSITORY

SCRIPT = "import sys; sys.path.pop(0); from jaxlm.__main__ import main; sys.exit(main())"  # how an entry point starts


@pytest.mark.slow
def test_the_script_imports_from_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text("raise RuntimeError('mine.py was imported')\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-c", SCRIPT, "train", "--config_path", "jaxlm:quickstart.yaml"]
    command += ["--objective.type", "mine:Objective", "--dry_run", "true"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert "importing mine failed: RuntimeError: mine.py was imported" in result.stderr
