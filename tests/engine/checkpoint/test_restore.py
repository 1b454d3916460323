"""Finding a checkpoint on several processes: an error of process 0 reaches the others."""

import jax
import pytest

from jaxlm.core import runtime
from jaxlm.engine.checkpoint import restore
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.restore import latest_valid
from jaxlm.engine.checkpoint.store import CURSOR


@pytest.mark.parametrize(
    "where", [(LocalCheckpoint, "verify"), (LocalFolder, "set_aside"), (LocalFolder, "checkpoints")]
)
def test_other_processes_do_not_wait_if_process_0_fails(tmp_path, monkeypatch, where):
    folder, sent = LocalFolder(tmp_path), []
    for step in (1, 2):
        folder.begin(f"step-{step}", {CURSOR: Cursor(step, 0, "train", entering=False, temporary=False).to_json()})
        folder.commit(f"step-{step}")
    (tmp_path / "step-2" / CURSOR).write_bytes(b"")

    def failing(*_args):
        raise OSError("no such disk")

    monkeypatch.setattr(*where, failing)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(runtime, "broadcast_from_main", lambda news: sent.append(news) or news)
    monkeypatch.setattr(runtime, "all_processes", lambda holds: holds)
    monkeypatch.setattr(restore, "broadcast_from_main", lambda news: news)
    with pytest.raises(OSError, match="no such disk"):
        latest_valid(folder, print)
    assert "OSError: no such disk" in str(runtime._decode_failure(sent[-1]))
