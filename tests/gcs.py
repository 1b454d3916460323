"""An emulator of Google Cloud Storage on this machine, as gcsfs and TensorStore find it."""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def gcs_server() -> Iterator[dict[str, str]]:
    """Runs the server; what it gives is the environment in which programs use it, this one too from now on.

    Once in a process: TensorStore looks at its variable only then.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    environment = {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # the emulator knows no such buckets
    }
    os.environ |= environment  # gcsfs looks at the last one when it is imported
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it calls what is not there an error
    server = emulator.create_server("127.0.0.1", int(address.rpartition(":")[2]), in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        yield environment
    finally:
        server.stop()
