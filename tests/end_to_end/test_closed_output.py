"""Commands whose output is read by a program that has ended, as in `jaxlm train --help | head -3`."""

import os
import signal
import subprocess
import sys

import pytest

from jaxlm.session.exit_codes import command
from tests.end_to_end.commands import REPOSITORY
from tests.end_to_end.waiting import EVALS
from tests.xla_flags import flags_for

CLOSED = 128 + signal.SIGPIPE


def run_without_reader(*words: str, folder, **environment: str) -> tuple[int, str]:
    """Exit code and standard error of a command that writes into a pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    # Without a buffer, argparse itself ignores that its help cannot be written.
    env = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "PYTHONUNBUFFERED": "", **environment}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("recipes",), ("train", "--help")],
)
def test_texts_end_quietly(tmp_path, arguments):
    assert run_without_reader("jaxlm", *arguments, folder=tmp_path) == (CLOSED, "")


@pytest.mark.soak  # two more commands than above
def test_the_help_of_a_command_ends_quietly(tmp_path):
    assert run_without_reader("jaxlm", "sample", "--help", folder=tmp_path) == (CLOSED, "")
    assert run_without_reader("jaxlm.train", "--help", folder=tmp_path) == (CLOSED, "")


@pytest.mark.soak
def test_sampling_ends_quietly(finished):
    arguments = ("jaxlm", "sample", "--checkpoint", "checkpoints/run", "--prompt", "def ", "--max_new_tokens", "4")
    code, errors = run_without_reader(*arguments, folder=finished.folder, XLA_FLAGS=flags_for(1))
    assert code == CLOSED
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@pytest.mark.slow
def test_training_goes_on_and_its_log_is_complete(workplace):
    """Prints into the pipe only begin to fail once the log is open, if its reader stays until then. The run waits for its end
    at the first evaluation.
    """
    place = workplace()
    place.write(EVALS)
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlm", "train", "--config_path", "run.yaml"],
        cwd=place.folder,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}", "XLA_FLAGS": flags_for(1)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.startswith("compiling"):
            break
    process.stdout.close()
    (place.folder / "go").touch()
    errors = process.stderr.read()
    assert process.wait() == 0, errors
    assert "Traceback" not in errors
    text = (place.folder / "logs" / "run" / "train.log").read_text()
    assert "the program that read the output has ended; the run goes on" in text
    assert "step 24/24" in text
    assert "step-24" in place.checkpoints()


def test_a_broken_pipe_of_something_else_is_not_hidden():
    def main(arguments):
        raise BrokenPipeError("the socket of a bucket")

    with pytest.raises(BrokenPipeError, match="bucket"):
        command(main)([])
