"""Finding a checkpoint on several processes: an error of process 0 reaches the others."""

import pytest

from jaxlm.core.errors import PeerError
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.restore import latest_valid
from jaxlm.engine.checkpoint.store import CURSOR
from tests.processes import together


@pytest.mark.parametrize(
    "where", [(LocalCheckpoint, "verify"), (LocalFolder, "set_aside"), (LocalFolder, "checkpoints")]
)
def test_other_processes_do_not_wait_if_process_0_fails(tmp_path, monkeypatch, where):
    folder = LocalFolder(tmp_path)
    for step in (1, 2):
        folder.begin(f"step-{step}", {CURSOR: Cursor(step, 0, "train", entering=False, temporary=False).to_json()})
        folder.commit(f"step-{step}")
    (tmp_path / "step-2" / CURSOR).write_bytes(b"")

    def failing(*_args):
        raise OSError("no such disk")

    monkeypatch.setattr(*where, failing)
    first, second = together(*[lambda: latest_valid(folder, print)] * 2)
    assert (type(first), type(second)) == (OSError, PeerError)
    assert str(second) == "process 0: OSError: no such disk"
