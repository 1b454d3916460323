"""How every command ends: an exit code, and for what the user can mend one message instead of a traceback."""

import os
import sys
from collections.abc import Callable

from jaxlm.core.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, PeerError
from jaxlm.engine.checkpoint.restore import NoUsableCheckpointError
from jaxlm.engine.checkpoint.store import SaveError
from jaxlm.engine.metrics import NonFiniteError


def run_command(body: Callable[[], int]) -> int:
    """Runs a command's body and turns what it raises into an exit code.

    2: the configuration or its data is wrong. 1: a checkpoint could not be saved, none could be loaded, another process
    of the run failed, or a number was not finite where the configuration says to stop then. 130: Ctrl-C before training
    began. Anything else is a defect, or a failure that only its traceback explains, and stays one.
    """
    try:
        return body()
    except ConfigError as error:
        code = EXIT_CONFIG
        message = f"error: {error}"
    except (NoUsableCheckpointError, NonFiniteError, PeerError) as error:
        code = EXIT_FAILED
        message = f"error: {error}"
    except SaveError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # TensorStore's other writes may still be running, and would call into an interpreter that is going away.
        os._exit(EXIT_FAILED)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        message = "interrupted before training began; nothing is lost"
    print(message, file=sys.stderr, flush=True)
    return code
