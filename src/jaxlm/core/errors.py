"""Ends commands without a traceback: exceptions that are printed as messages, checks that raise them, and Ctrl-C."""

import argparse
import contextlib
import difflib
import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NoReturn

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_HUNG = 75  # EX_TEMPFAIL of sysexits.h: a start may succeed
EXIT_CLOSED_OUTPUT = 128 + signal.SIGPIPE

_MAX_CHARACTERS = 2000  # of a line of a message
_MAX_LINES = 50
_MAX_LISTED = 20
_MAX_SHOWN = 200  # characters of a key or a value


def bounded(message: str) -> str:
    """A message without the middle of lines that are too long to read, such as one with a value of 100 kB.

    The beginning of a line says what was given, and its end what to change.
    """
    lines = message.split("\n")
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], f"... {len(lines) - _MAX_LINES:,} more lines"]
    return "\n".join(map(_bounded_line, lines))


def _bounded_line(line: str) -> str:
    if len(line) <= _MAX_CHARACTERS:
        return line
    head, tail = _MAX_CHARACTERS * 3 // 5, _MAX_CHARACTERS // 5
    return f"{line[:head]} ... ({len(line) - head - tail:,} characters left out) ... {line[-tail:]}"


def shortened(text: str) -> str:
    """Cuts off a key or a value for a message if it is too long to read."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


def shown(value: Any) -> str:
    """Writes a value for a message. Python writes no integers with more than some thousand digits."""
    try:
        return shortened(repr(value))
    except ValueError:
        return "a value with too many digits to show"


def listed(names: Collection[str]) -> str:
    """Lists names for a message: the first of them, and how many more there are."""
    shown = ", ".join(itertools.islice(names, _MAX_LISTED))
    more = f", ... ({len(names) - _MAX_LISTED:,} more)" if len(names) > _MAX_LISTED else ""
    return f"{shown}{more}" or "none"


def nearest_spelling(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Finds the known name with the most similar spelling."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], before: str = "'", after: str = "'") -> str:
    """Writes a question for a message, with a space before it; empty if no known name is similar."""
    near = nearest_spelling(name, known)
    return f" Did you mean {before}{near}{after}?" if near else ""


def counted(number: int, noun: str) -> str:
    """Writes a number with its noun, as `1 process` or `2 processes`."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


class ConfigError(ValueError):
    """Invalid user input. The message says what was given, what is allowed, and what to change.

    Commands print the message without a traceback and exit with code 2.
    """

    def __init__(self, message: str = ""):
        """Args: message: long lines lose their middle, whatever values they show."""
        super().__init__(bounded(message))


@contextlib.contextmanager
def within(where: str) -> Iterator[None]:
    """Says in front of a `ConfigError` where it arose."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def say(line: str) -> None:
    """Prints a line on standard error, where no console is open."""
    print(line, file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """argparse's parser, with messages that are as short as those of `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        super().error(bounded(message))


class PeerError(Exception):
    """Another process of the run failed, so this process stops too.

    Commands print the message without a traceback and exit with code 1.
    """


def end_of_output(error: BrokenPipeError) -> int:
    """The exit code after the program that reads standard output has ended (`| head`). What is printed later is dropped.

    Re-raises an error that comes from something other than standard output.
    """
    if not is_output_closed():
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CLOSED_OUTPUT


def is_output_closed() -> bool:
    """Tells whether the program that reads standard output has ended."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    except (OSError, ValueError):  # a stream without a file, as in tests and notebooks
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def check_at_least(path: str, value: float, least: float) -> None:
    """Raises `ConfigError` unless `value` is at least `least`."""
    if not value >= least:
        raise ConfigError(f"{path}: {value} given, {least} or more expected")


def check_choice(path: str, value: str, allowed: Iterable[str]) -> None:
    """Raises `ConfigError` unless `value` is one of `allowed`."""
    if value not in (names := sorted(allowed)):
        raise ConfigError(f"{path}: '{value}' given. Allowed: {', '.join(names)}")


def divisors(number: int) -> list[str]:
    """The divisors of a number in ascending order, for messages."""
    return [str(d) for d in range(1, number + 1) if number % d == 0]


def check_divides(path: str, value: int, whole_path: str, whole: int) -> None:
    """Raises `ConfigError` unless `value` divides `whole`."""
    if whole % value:
        raise ConfigError(
            f"{path}: {value} given, which does not divide {whole_path} = {whole}. Allowed: {listed(divisors(whole))}; or"
            f" change {whole_path}"
        )


def end_at_interrupt() -> None:
    """Ctrl-C ends the process at once, without a traceback: while a command starts or ends, nothing handles it.

    A shell shows the exit code 130. Nothing changes where Ctrl-C is ignored or has a handler, and outside the main thread.
    """
    _replace_handler(signal.default_int_handler, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """Ctrl-C raises `KeyboardInterrupt`, as at the start of Python."""
    _replace_handler(signal.SIG_DFL, signal.default_int_handler)


def _replace_handler(before: Any, after: Any) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)
