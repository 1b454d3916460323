"""Two processes that share only a bucket: killed during saves, they end like an uninterrupted run."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from jaxlm.engine.checkpoint.bucket import BucketFolder
from jaxlm.engine.checkpoint.manifest import CHECKSUMS
from tests.end_to_end.commands import Workplace, end_of
from tests.end_to_end.fork_server import PLOTS
from tests.gcs import BUCKET
from tests.ports import reserved_port

URL = f"gs://{BUCKET}/pod"
STEPS = 12
RUN = ("--config_path", "run.yaml", "--trainer.num_train_steps", str(STEPS), "--trainer.steps_per_eval", "50")
EVERY_THIRD = ("--trainer.checkpointer.keep", "[{every: 3}]")


def machines(shared: Path, tmp_path: Path) -> list[Workplace]:
    """Two folders; no file may be written to both. Compiled programs are shared, which saves their compilation."""
    made = []
    for number in range(2):
        folder = tmp_path / f"machine-{number}"
        folder.mkdir()
        made.append(Workplace(folder, folder / "cache", shared / "corpus"))
        path = made[-1].write()
        path.write_text(path.read_text().replace(f"{folder}/cache/xla", f"{shared}/cache/xla"))
    return made


def start(
    where: Sequence[Workplace], url: str, run_id: str, environment: dict[str, str], module: str = "jaxlm.train"
) -> list[subprocess.Popen[str]]:
    """Process 0 on the first machine, process 1 on the second."""
    distributed = f"{{coordinator_address: '127.0.0.1:{reserved_port()}', num_processes: 2, process_id: %d}}"
    common = (*RUN, *EVERY_THIRD, "--trainer.checkpointer.base_path", url, "--trainer.id", run_id)
    return [
        place.start(*common, "--trainer.distributed", distributed % number, module=module, **environment)
        for number, place in enumerate(where)
    ]


def finish(where: Sequence[Workplace], url: str, run_id: str, environment: dict[str, str]) -> str:
    """Trains to the end; returns the output of process 0."""
    ends = [end_of(process) for process in start(where, url, run_id, environment)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    return ends[0][1]


def killed(where: Sequence[Workplace], url: str, environment: dict[str, str], process: int, name: str) -> None:
    """Trains until one process kills itself during a save, then kills the other one."""
    environment = environment | {"JAXLM_TEST_DIES_SAVING": f"{process}:{name}"}
    running = start(where, url, "x", environment, module="tests.end_to_end.dies_saving")
    assert running[process].wait(timeout=300) == -signal.SIGKILL, running[process].communicate()
    running[1 - process].kill()
    for each in running:
        each.communicate()
    assert name not in BucketFolder(f"{url}/x").names()
    assert fsspec.filesystem("gs").find(f"{url}/x/{name}/run")  # it was in the middle of the save


def logged(places: Sequence[Workplace], run_id: str) -> list[tuple[int, str]]:
    """(step, loss) of all records that process 0 has logged, on either machine."""
    found = [place for place in places if (place.folder / "logs" / run_id / "metrics.jsonl").is_file()]
    return [item for place in found for item in place.losses(run_id).items()]


def arrays(url: str) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        paths = reader.metadata(f"{url}/state").item_metadata.tree
        as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths}
        return reader.restore(f"{url}/state", args=ocp.args.PyTreeRestore(restore_args=as_numpy))


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(1, "step-6")], marks=pytest.mark.soak, id="one"),
        pytest.param([(0, "step-6"), (1, "step-9")], marks=pytest.mark.soak, id="both"),
    ],
)
def test_killed_during_saves_on_machines_without_a_shared_disk(gcs, shared, tmp_path, kills):
    url = f"{URL}/{len(kills)}"
    here, there = places = machines(shared, tmp_path)
    finish((here, there), url, "whole", gcs)
    for process, name in kills:
        killed((here, there), url, gcs, process, name)
        here, there = there, here  # each resumes on the other's disk, whose contents are not needed
    said = finish((here, there), url, "x", gcs)
    assert f"resuming, from {url}/x/step-{3 * len(kills)}" in said
    run = BucketFolder(f"{url}/x")
    assert run.names() == ["step-3", "step-6", "step-9", "step-12"]
    sums = run.read("step-12", CHECKSUMS).decode()
    assert "ocdbt.process_0/" in sums
    assert "ocdbt.process_1/" in sums  # both processes have written to it
    whole, found = arrays(f"{url}/whole/step-{STEPS}"), arrays(f"{url}/x/step-{STEPS}")
    assert whole.keys() == found.keys()
    assert all(np.array_equal(whole[path], found[path]) for path in whole)
    expected = dict(logged(places, "whole"))
    losses = logged(places, "x")
    assert {step for step, _ in losses} == set(expected) == set(range(1, STEPS + 1))
    assert all(loss == expected[step] for step, loss in losses)
    assert not any((place.folder / name).exists() for place in places for name in ("checkpoints", "cache/checkpoints"))


@pytest.mark.soak  # one of four processes in tests/end_to_end/test_peers.py
def test_machines_with_different_text_do_not_train(shared, tmp_path):
    """One copy of the text is older: its batches would silently be mixed with the other machine's."""
    here, there = machines(shared, tmp_path)
    shutil.copytree(shared / "corpus", tmp_path / "older")
    next((tmp_path / "older" / "train").iterdir()).write_text("some other text\n" * 9999)
    there = replace(there, corpus=tmp_path / "older")
    there.write()
    ends = [end_of(process) for process in start((here, there), str(tmp_path / "checkpoints"), "x", {})]
    assert [code for code, _, _ in ends] == [2, 2], ends
    assert all("data of phase 'train': " in err for _, _, err in ends)


EVERYTHING = f"gs://{BUCKET}/everything"
IN_BUCKET = (
    *("--data.cache_dir", f"{EVERYTHING}/cache", "--trainer.log_dir", f"{EVERYTHING}/logs"),
    *("--hf_save_steps", "12"),
    *("--trainer.checkpointer.base_path", f"{EVERYTHING}/runs", *EVERY_THIRD),
)


def losses_in_bucket(run_id: str) -> dict[int, str]:
    text = fsspec.filesystem("gs").cat_file(f"{EVERYTHING}/logs/{run_id}/metrics.jsonl").decode()
    records = [json.loads(line) for line in text.splitlines()]
    return {record["step"]: float(record["train/loss"]).hex() for record in records if "train/loss" in record}


@pytest.mark.soak
def test_a_run_whose_folders_are_all_in_a_bucket_moves_from_machine_to_machine(gcs, shared, tmp_path):
    """Text, configuration, cache, logs, exports and checkpoints. Each machine starts with an empty disk; one is killed."""
    fs = fsspec.filesystem("gs")
    fs.put(str(shared / "corpus"), f"{EVERYTHING}/corpus", recursive=True)
    machine = []
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        machine.append(Workplace(tmp_path / f"{number}", tmp_path / f"{number}" / "cache", shared / "corpus"))
        machine[-1].write()
    text = machine[0].write().read_text().replace(str(shared / "corpus"), f"{EVERYTHING}/corpus")
    fs.pipe_file(f"{EVERYTHING}/run.yaml", text.encode())
    run = ("--config_path", f"{EVERYTHING}/run.yaml", *IN_BUCKET)
    of_x = ("--trainer.id", "x", "--hf_save_path", f"{EVERYTHING}/hf/x")
    whole = machine[0].run(*run, "--trainer.id", "whole", "--hf_save_path", f"{EVERYTHING}/hf/whole", **gcs)
    assert whole.code == 0, whole.err
    assert "mirror: " in whole.out
    died = machine[1].run(*run, *of_x, module="tests.end_to_end.dies", JAXLM_TEST_DIES_AT="second phase", **gcs)
    assert died.code == -signal.SIGKILL, died.err
    assert "copying" in died.out
    assert "training a BPE tokenizer" not in died.out
    assert "mirror: " not in died.out
    assert "train, read in blocks of 0.262 MB; 0 GB of it in cache/blocks" in died.out
    assert not list(machine[1].folder.rglob("tokens.bin"))
    last = machine[2].run(*run, *of_x, **{PLOTS: "1"}, **gcs)
    assert last.code == 0, last.err
    assert re.search(f"resuming, from {EVERYTHING}/runs/x/step-(9|12)", last.out)
    assert losses_in_bucket("x") == losses_in_bucket("whole")
    assert len(losses_in_bucket("x")) == 24
    logs = {path.rpartition("/")[2] for path in fs.find(f"{EVERYTHING}/logs/x")}
    assert {"metrics.jsonl", "config.yaml", "train.log", "loss.png", "schedule.png"} <= logs
    exported = {
        name: fs.cat_file(path) for path in fs.find(f"{EVERYTHING}/hf/x") if (name := path.partition("/hf/x/")[2])
    }
    assert {"step-12/config.json", "step-24/config.json", "step-24/model.safetensors"} <= exported.keys()
    for name, content in exported.items():
        ours = content.replace(b"\n# x\n", b"\n# whole\n") if name.endswith("README.md") else content
        assert ours == fs.cat_file(f"{EVERYTHING}/hf/whole/{name}"), name


def lease(url: str) -> dict[str, Any] | None:
    """Who holds the run's folder; None also while it changes."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    found = sorted(name for name in fs.find(path) if "/lease-" in name)
    try:
        return json.loads(fs.cat_file(found[-1])) if found else None
    except FileNotFoundError:
        return None


def until(holds: Callable[[], object], timeout_s: float = 400) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.soak
def test_a_second_start_in_a_bucket_is_refused_and_a_crash_or_a_pause_hands_the_run_over(gcs, shared, tmp_path):
    """One trains, and the next is refused. After a kill, the next goes on at once. It is paused, and the last takes over."""
    first, second = machines(shared, tmp_path)
    url = f"gs://{BUCKET}/leases"
    common = ("--config_path", "run.yaml", *EVERY_THIRD, "--trainer.checkpointer.base_path", url, "--trainer.id", "x")

    def start(place: Workplace, steps: int) -> Any:
        own = ("--trainer.num_train_steps", str(steps), "--trainer.steps_per_eval", "1000000")
        return place.start(*common, *own, module="tests.end_to_end.leased", JAXLM_TEST_LEASE="2:0.2", **gcs)

    def saved(number: int) -> Callable[[], bool]:
        names = BucketFolder(f"{url}/x").names
        return lambda: any(int(name.removeprefix("step-")) >= number for name in names())

    training = start(first, 100_000)
    until(saved(3))
    code, out, err = end_of(start(second, STEPS))
    assert code == 2, err
    assert f"already being trained (process {training.pid} on " in err
    training.kill()
    training.communicate()

    paused = start(second, 100_000)  # another log folder, on the same machine: it takes over at once
    until(lambda: (found := lease(f"{url}/x")) and found["holder"]["pid"] == paused.pid)
    until(saved(2 + max(int(name.removeprefix("step-")) for name in BucketFolder(f"{url}/x").names())))
    os.kill(paused.pid, signal.SIGSTOP)
    try:
        code, out, err = end_of(start(first, 60))
        assert code == 0, err
        assert f"was held by process {paused.pid} on " in out
        assert "has sent no heartbeat for 5 s: taken over" in out
        before = BucketFolder(f"{url}/x").names()
        assert before[-1] == "step-60"
    finally:
        os.kill(paused.pid, signal.SIGCONT)
    code, out, err = end_of(paused)
    assert code == 1, err
    assert "error: another start of this run has taken" in err
    assert "Traceback" not in err
    assert BucketFolder(f"{url}/x").names() == before
    assert lease(f"{url}/x") is None
