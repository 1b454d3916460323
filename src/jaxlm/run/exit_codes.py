"""Exit codes of the commands. Errors that the user can fix are printed as one message without a traceback."""

import functools
import os
import sys
from collections.abc import Callable, Sequence

from jaxlm.core.errors import EXIT_CONFIG, ConfigError, PeerError
from jaxlm.engine.checkpoint.restore import NoUsableCheckpointError
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.conductor import RewindError
from jaxlm.engine.metrics import NonFiniteError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def command(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorates a command's `main`: converts known exceptions to exit codes. Called without arguments, it takes those of the
    command line.

    2: the configuration or the data is wrong. 1: a checkpoint could not be saved, no checkpoint could be loaded, another
    process of the run failed, a loss or gradient was not finite and the configuration says to stop, or the run cannot go
    back to an earlier checkpoint (again). 130: Ctrl-C before training began. Other exceptions are passed on with their
    traceback.
    """

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if arguments is None else arguments)
        except ConfigError as error:
            code, message = EXIT_CONFIG, f"error: {error}"
        except (NoUsableCheckpointError, NonFiniteError, PeerError, RewindError) as error:
            code, message = EXIT_FAILED, f"error: {error}"
        except SaveError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            # Exit at once: TensorStore's other writes may still be running and would call into a finalizing interpreter.
            os._exit(EXIT_FAILED)
        except KeyboardInterrupt:
            code, message = EXIT_INTERRUPTED, "interrupted before training started; nothing was lost"
        print(message, file=sys.stderr, flush=True)
        return code

    return run
