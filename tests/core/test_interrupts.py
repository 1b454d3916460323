"""Ctrl-C while a command starts or ends."""

import signal
import subprocess
import sys

import pytest

from tests.forks import ends_of

# `python -m jaxlm.X`, and `python -m another` that imports jaxlm, import the package with these words.
IMPORTING = """
import os, signal, sys
sys.argv[0], sys.orig_argv = "{first}", ["python", "-u", "-m", "{module}"]
import jaxlm
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("caught", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
"""
NEEDED = """
import atexit, os, signal, sys, types
from jaxlm.__main__ import main as jaxlm
from jaxlm.session.exit_codes import command
"""
TWICE = """
@command
def main(arguments):
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("Ctrl-C did nothing")

assert main([]) == 130
os.kill(os.getpid(), signal.SIGINT)
"""
ENDED = """
@command
def main(arguments):
    return 130

sys.modules["jaxlm.commands.bench"] = types.SimpleNamespace(main=main)
atexit.register(os.kill, os.getpid(), signal.SIGINT)  # as jax clears its caches there
sys.argv = ["jaxlm", "bench"]
sys.exit({call})
"""


@pytest.mark.parametrize(
    ("code", "number", "said"),
    [
        pytest.param(IMPORTING.format(first="-m", module="jaxlm.train"), signal.SIGINT, "", id="importing"),
        pytest.param(IMPORTING.format(first="/x/bin/jaxlm", module=""), signal.SIGINT, "", id="importing as a script"),
        pytest.param(IMPORTING.format(first="-m", module="another"), signal.SIGKILL, "caught\n", id="another program"),
    ],
)
def test_an_interrupt_ends_an_import_without_a_traceback(code, number, said):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-number, said)


@pytest.mark.slow
def test_an_interrupt_ends_a_command_without_a_traceback(tmp_path):
    programs = {
        TWICE: "interrupted; nothing that was saved is lost\n",
        ENDED.format(call="main()"): "",
        ENDED.format(call="jaxlm()"): "",
    }
    ends = ends_of(NEEDED, list(programs), tmp_path)
    assert ends == [(-signal.SIGINT, said) for said in programs.values()]
