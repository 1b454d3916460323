"""A local S3 server, moto's, for s3fs."""

import contextlib
import logging
import urllib.request
from collections.abc import Iterator

import pytest

S3_BUCKET = "bucket"


@contextlib.contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Runs the server with an empty bucket. Yields the environment variables that point to it, which `patch` sets here."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environment.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    # All servers of a process have the same content.
    urllib.request.urlopen(urllib.request.Request(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST"))
    try:
        s3fs.S3FileSystem().mkdir(S3_BUCKET)
        yield environment
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()
