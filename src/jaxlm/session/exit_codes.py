"""Exit codes of the commands. Errors that the user can fix are printed as one message without a traceback."""

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from jaxlm.controllers.base import StopRunError
from jaxlm.core.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    ConfigError,
    PeerError,
    bounded,
    end_at_interrupt,
    end_of_output,
    is_output_closed,
    raise_at_interrupt,
)
from jaxlm.core.publish import PublishError
from jaxlm.core.redaction import command_line
from jaxlm.engine.checkpoint.lease import LeaseLostError
from jaxlm.engine.checkpoint.restore import NoUsableCheckpointError
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.metrics import NonFiniteError
from jaxlm.engine.peers import end_with_peers, has_peers, is_lost_peer, stop_watching_peers
from jaxlm.engine.phase_runner import RewindError
from jaxlm.evals.base import GateError

EXIT_INTERRUPTED = 130
_FAILED = (
    *(
        GateError,
        LeaseLostError,
        NoUsableCheckpointError,
        NonFiniteError,
        PeerError,
        PublishError,
        RewindError,
        SaveError,
    ),
    StopRunError,
)


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorates a command's `main`: converts known exceptions to exit codes. Called without arguments, it takes those of the
    command line.

    2: the configuration, the command line or the data is wrong, a reward or an environment has failed, or a dry run found
    that a start would fail. 1: a checkpoint or an exported model could not be saved, no checkpoint could be loaded,
    another process of the run failed, another start has taken over the run, a loss or gradient was not finite and the
    configuration says to stop, too many updates in a row were skipped, an evaluation with `fail_fast` was not passed, or the
    run cannot go back to an earlier checkpoint (again). 75: the run made no progress. 130: Ctrl-C before training began or
    after it ended. 141: the program that reads the output has ended (`| head`). Other exceptions are passed on with their
    traceback.
    """

    def explained(arguments: Sequence[str]) -> int:
        try:
            code = main(arguments)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, BrokenPipeError) and is_output_closed():
                raise
            if isinstance(error, KeyboardInterrupt):
                end_at_interrupt()  # a second Ctrl-C would interrupt what follows, or the end of the interpreter
            code, message = _explained(error)
            print(message := bounded(message), file=sys.stderr, flush=True)
            end_with_peers(code, message.removeprefix("error: "))
            if isinstance(error, SaveError | LeaseLostError):
                sys.stdout.flush()
                # Exit at once: TensorStore's other writes may still be running and would call into a finalizing interpreter.
                os._exit(code)
            return code
        stop_watching_peers()
        return code

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        raise_at_interrupt()
        try:
            try:
                return explained(command_line() if arguments is None else arguments)
            finally:
                if arguments is None:  # the interpreter ends next
                    end_at_interrupt()
                sys.stdout.flush()  # not when the interpreter ends, where a closed pipe would be a traceback
        except BrokenPipeError as error:
            code = end_of_output(error)
            end_with_peers(code, "the program that reads the output has ended")
            return code

    return run


def _explained(error: BaseException) -> tuple[int, str]:
    """The exit code and the message of an exception. Re-raises those that are not the user's to fix."""
    match error:
        case ConfigError():
            return EXIT_CONFIG, f"error: {error}"
        case OSError(errno=errno.ENAMETOOLONG):  # every path in a configuration may be one
            return EXIT_CONFIG, f"error: '{error.filename}' given as a path, but its names are too long. Shorten them"
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED, "interrupted; nothing that was saved is lost"
        case _ if isinstance(error, _FAILED):
            notes = getattr(error, "__notes__", ())  # what was saved after the error
            return EXIT_FAILED, f"error: {'. '.join([str(error).rstrip('.'), *notes]) if notes else error}"
    if is_lost_peer(error):
        first_line = str(error).partition("\n")[0]
        return EXIT_FAILED, (
            f"error: an exchange with the other processes failed ({first_line}): one of them has ended, was killed or cannot"
            " be reached. Run the same command again to continue from the newest checkpoint"
        )
    if has_peers():
        traceback.print_exception(error)
        return EXIT_FAILED, f"error: {type(error).__name__}: {error}"
    raise error
