"""Two processes that share no disk, and a bucket: killed inside of saves, they end as if they had not been."""

import signal
import socket
import subprocess
from collections.abc import Sequence

import fsspec
import numpy as np
import pytest

from jaxlm.engine.integrity import CHECKSUMS
from jaxlm.engine.remote import RemoteFolder
from tests.gcs import BUCKET
from tests.runs.commands import Workplace
from tests.runs.test_signals import process_end

URL = f"gs://{BUCKET}/pod"
STEPS = 12
RUN = ("--config_path", "run.yaml", "--trainer.num_train_steps", str(STEPS), "--trainer.steps_per_eval", "50")
EVERY_THIRD = ("--trainer.checkpointer.keep", "[{every: 3}]")


def machines(shared, tmp_path) -> list[Workplace]:
    """Two folders, and nothing that is written is in both."""
    made = []
    for number in range(2):
        folder = tmp_path / f"machine-{number}"
        folder.mkdir()
        made.append(Workplace(folder, folder / "cache", shared / "corpus"))
        made[-1].write()
    return made


def start(
    where: Sequence[Workplace],
    run_id: str,
    environment: dict[str, str],
    *,
    base: str = URL,
    module: str = "jaxlm.train",
) -> list[subprocess.Popen[str]]:
    """Process 0 on the first machine, process 1 on the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed = f"{{coordinator_address: '127.0.0.1:{port}', num_processes: 2, process_id: %d}}"
    common = (*RUN, *EVERY_THIRD, "--trainer.checkpointer.base_path", base, "--trainer.id", run_id)
    return [
        place.start(*common, "--trainer.distributed", distributed % number, module=module, **environment)
        for number, place in enumerate(where)
    ]


def finish(where: Sequence[Workplace], run_id: str, environment: dict[str, str]) -> str:
    """Trains to the end; what process 0 said."""
    ends = [process_end(process) for process in start(where, run_id, environment)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    return ends[0][1]


def killed(where: Sequence[Workplace], run_id: str, environment: dict[str, str], process: int, name: str) -> None:
    """Trains until a process kills itself inside of a save, and kills the other one then."""
    environment = environment | {"JAXLM_TEST_DIES_SAVING": f"{process}:{name}"}
    running = start(where, run_id, environment, module="tests.runs.dies_saving")
    assert running[process].wait(timeout=300) == -signal.SIGKILL, running[process].communicate()
    running[1 - process].kill()
    for each in running:
        each.communicate()
    assert name not in RemoteFolder(f"{URL}/{run_id}").names()
    assert fsspec.filesystem("gs").find(f"{BUCKET}/pod/{run_id}/{name}/run")  # it was inside of the save


def arrays(url: str) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        paths = reader.metadata(f"{url}/state").item_metadata.tree
        as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths}
        return reader.restore(f"{url}/state", args=ocp.args.PyTreeRestore(restore_args=as_numpy))


@pytest.mark.slow
def test_killed_inside_of_saves_on_machines_that_share_no_disk(gcs, shared, tmp_path):
    a, b = machines(shared, tmp_path)
    finish((a, b), "whole", gcs)
    killed((a, b), "x", gcs, process=0, name="step-6")
    killed((b, a), "x", gcs, process=1, name="step-9")  # each on the other's disk: what is there is not needed
    said = finish((a, b), "x", gcs)
    assert f"going on, from {URL}/x/step-6" in said
    assert RemoteFolder(f"{URL}/x").names() == ["step-3", "step-6", "step-9", "step-12"]
    sums = RemoteFolder(f"{URL}/x").read("step-12", CHECKSUMS).decode()
    assert "ocdbt.process_0/" in sums
    assert "ocdbt.process_1/" in sums  # both have written there
    whole, found = arrays(f"{URL}/whole/step-{STEPS}"), arrays(f"{URL}/x/step-{STEPS}")
    assert whole.keys() == found.keys()
    assert all(np.array_equal(whole[path], found[path]) for path in whole)
    expected = a.losses("whole")
    assert list(expected) == list(range(1, STEPS + 1))
    assert a.losses("x") == expected
    assert all(loss == expected[step] for step, loss in b.losses("x").items())
    assert not any((place.folder / name).exists() for place in (a, b) for name in ("checkpoints", "cache/checkpoints"))


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_one_message(shared, tmp_path):
    """Each process would write its part to another disk, and what is missing would be read as zeros."""
    ends = [process_end(each) for each in start(machines(shared, tmp_path), "x", {}, base="checkpoints")]
    assert [code for code, _, _ in ends] == [2, 2], ends
    for _, _, err in ends:
        assert "checkpoints/x is not the same for all processes" in err
        assert "Traceback" not in err
