"""Reward functions of tests. They are also run as a file, which imports the one beside it."""

import asyncio
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import helper_of_functions  # pyright: ignore[reportMissingImports] - beside this file


def lengths(completions, **kwargs):
    """As TRL calls it: everything by name, and all columns."""
    assert set(kwargs) >= {"prompts", "completion_ids", "answer"}
    return [float(len(text)) for text in completions]


def of_row(completion, answer, weight=2.0):
    return None if answer is None else weight * (completion == answer)


async def waiting(completion, place):
    await asyncio.sleep(0.01)
    return helper_of_functions.ONE + len(place)


async def waiting_for_all(completions):
    await asyncio.sleep(0.01)
    return [1] * len(completions)


class Hostile:
    def __repr__(self):
        raise RuntimeError("no text")


def as_told(completion):
    """Does what the completion says."""
    match completion.split():
        case ["raise"]:
            raise KeyError("answer")
        case ["return", value]:
            known = {"nan": float("nan"), "text": "good", "none": None, "7": 7, "large": 1e39}
            known |= {"huge": 10**400, "endless": 10**5000}
            return known[value] if value in known else Hostile()
        case ["exit"]:
            sys.exit(3)
        case ["kill", number]:
            os.kill(os.getpid(), int(number))
        case ["fork", "exit"]:
            if os.fork() == 0:
                time.sleep(600)
            os._exit(3)
        case ["fork"]:
            return float(os.fork() != 0)
        case ["devices"]:
            hidden = {
                "CUDA_VISIBLE_DEVICES": "",
                "HIP_VISIBLE_DEVICES": "-1",
                "JAX_PLATFORMS": "cpu",
                "PJRT_DEVICE": "CPU",
            }
            return float(hidden.items() <= os.environ.items())
        case ["hang", file]:
            _started(file, os.getpid())
            time.sleep(600)
        case ["leave", file]:
            _started(file)
        case ["leave", file, "kill"]:
            _started(file)
            os.kill(os.getpid(), 9)
        case ["write", text]:
            for number in filter(is_socket, range(3, 4096)):
                os.write(number, text.encode() + b"\n" * (text == "line"))
            if text == "nothing-else":
                time.sleep(600)
    return 0.5


DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.execvp("sleep", ["sleep", "600"])
"""


def _started(file, *pids):
    """Starts a program, one in a session of its own, and one whose parent has ended. Writes their numbers to a file."""
    others = [subprocess.Popen(["sleep", "600"], start_new_session=is_new) for is_new in (False, True)]
    ended = subprocess.Popen([sys.executable, "-S", "-c", DAEMON], stdout=subprocess.PIPE, text=True)
    assert ended.stdout is not None
    orphan = ended.stdout.readline()
    ended.wait()
    unfinished = Path(f"{file}.unfinished")
    unfinished.write_text(" ".join(map(str, [*pids, *(one.pid for one in others), orphan])))
    unfinished.rename(file)  # from now on, a test may end this process


def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


def waits(completion):
    """Waits for `touches`."""
    word, _, file = completion.partition(" ")
    while word == "wait" and not Path(file).exists():
        time.sleep(0.01)
    return 1


def touches(completion):
    word, _, file = completion.partition(" ")
    if word == "touch":
        Path(file).touch()
    return 1


def sleeps(completions):
    time.sleep(600)


def too_few(completions):
    return [1.0] * (len(completions) - 1)


NUMBER = 7
