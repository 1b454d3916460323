"""Finding a checkpoint: what its name must agree with, and an error of process 0 that reaches the other processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError, PeerError
from jaxlm.engine.checkpoint.local import LocalCheckpoint, LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.restore import latest_complete, latest_valid, newest_undamaged, restore
from jaxlm.engine.checkpoint.store import CURSOR
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth
from jaxlm.session.load_model import find_checkpoint
from tests.engine.helpers import one_device
from tests.processes import together


@pytest.mark.parametrize(
    ("cursor", "name"),
    [
        (Cursor(2, 0, "train", entering=False, temporary=False), "step-9"),
        (Cursor(12, 1, "sft", entering=True, temporary=False), "step-120-sft"),
        (Cursor(4, 0, "train", entering=False, temporary=False, history=History(attempt=1)), "step-4-attempt-2"),
    ],
)
def test_a_renamed_checkpoint_is_not_believed(tmp_path, cursor, name):
    """Its files are undamaged. A name that says no step is fine, such as that of a copy."""
    folder, saved = LocalFolder(tmp_path), cursor.folder_name
    folder.begin(saved, {CURSOR: cursor.to_json()})
    folder.commit(saved)
    (tmp_path / saved).rename(tmp_path / name)
    message = (
        rf"{name}: the folder is named {name}, but the checkpoint in it was saved as {saved}, after {cursor.step} steps"
    )
    for find in (
        lambda: latest_valid(folder, print),
        lambda: newest_undamaged(folder, [name], print),
        lambda: latest_complete(folder.checkpoints(), str(tmp_path), print),
        lambda: find_checkpoint(tmp_path),
        lambda: find_checkpoint(tmp_path / name),
    ):
        with pytest.raises(ConfigError, match=message):
            find()
    (tmp_path / name).rename(tmp_path / "best")
    assert find_checkpoint(tmp_path / "best").cursor == cursor


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


def test_moments_of_a_version_that_stored_them_in_bfloat16_are_read(tmp_path):
    """Parameters of another dtype are an error: they follow a key of the run."""
    folder = LocalFolder(tmp_path)
    folder.open(print)
    health = SaveHealth(CheckpointerConfig(), None, print)
    writer = CheckpointWriter(folder, {"config.yaml": b"{}"}, health, print, lambda: None)
    folder.prepare()
    saved = {name: {"w": jnp.arange(8, dtype=jnp.bfloat16) / 3} for name in ("model", "opt_state")}
    writer.save(saved, Cursor(1, 0, "train", entering=False, temporary=False), {})  # type: ignore[arg-type]
    writer.wait()
    found = latest_valid(folder, print)
    wide = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    narrow = jax.eval_shape(lambda: saved["model"])
    read = restore(found, {"model": narrow, "opt_state": wide}, one_device())
    np.testing.assert_array_equal(read["opt_state"]["w"], saved["opt_state"]["w"].astype(jnp.float32), strict=True)
    with pytest.raises(ConfigError, match=r"trainer\.mp"):
        restore(found, {"model": wide, "opt_state": wide}, one_device())
