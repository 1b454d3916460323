"""Ctrl-C while a command starts or ends."""

import signal
import subprocess
import sys

import pytest

# `python -m jaxlm.X` imports the package with this argv.
IMPORTING = """
import os, signal, sys
sys.argv[0] = "-m"
import jaxlm
os.kill(os.getpid(), signal.SIGINT)
"""
TWICE = """
import os, signal
from jaxlm.run.exit_codes import command

@command
def main(arguments):
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("Ctrl-C did nothing")

assert main([]) == 130
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param(IMPORTING, "", id="importing"),
        pytest.param(TWICE, "interrupted; nothing that was saved is lost\n", id="twice", marks=pytest.mark.slow),
    ],
)
def test_it_ends_the_process_without_a_traceback(code, said):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, said)
