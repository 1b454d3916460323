"""SIGTERM, or kill -9 at a random moment, then the same command again: bit for bit the uninterrupted run."""

import json
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from jaxlm.observe.ledger import account, read_lines
from tests.end_to_end.commands import Workplace, check_close
from tests.tiers import one_of

TENSOR_PARALLEL = ("--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[mlp, heads]")
MESHES = {
    "one device": (1, ()),
    "fsdp 8": (8, ()),
    "tp 2 x fsdp 4": (8, TENSOR_PARALLEL),
}
# Two microbatches.
PARALLELISM = {name: str(16 // n if "tp 2" in name else 8 // n) for name, (n, _) in MESHES.items()}


def arguments(mesh: str) -> list[str]:
    parallelism = () if mesh == "one device" else ("--trainer.per_device_parallelism", PARALLELISM[mesh])
    return ["--config_path", "run.yaml", *parallelism, *MESHES[mesh][1]]


@pytest.fixture(scope="session")
def uninterrupted(workplace, finished):
    """The uninterrupted run, once per mesh: (losses, hashes of its last checkpoint)."""

    @cache
    def run(mesh: str):
        if mesh == "one device":
            return finished.losses(), finished.digest("step-24")
        place = workplace(MESHES[mesh][0])
        place.write_averaged()
        place.finish(*arguments(mesh))
        return place.losses(), place.digest("step-24")

    return run


def kill(place: Workplace, mesh: str, wait_s: float, *, in_start: bool = False) -> None:
    """Kills the run some time after its start, or after it has finished another checkpoint."""
    saved = finished_checkpoints(place)
    process = place.start(*arguments(mesh))
    while not in_start and process.poll() is None and finished_checkpoints(place) <= saved:
        time.sleep(0.01)
    time.sleep(wait_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def finished_checkpoints(place: Workplace) -> set[str]:
    return {name for name in place.checkpoints() if name.startswith("step-") and name.removeprefix("step-").isdigit()}


def killed_at_random(place: Workplace, mesh: str, rng: random.Random, kills: int) -> None:
    for _ in range(kills):
        in_start = rng.random() >= 0.7
        kill(place, mesh, rng.uniform(0.5, 6.0) if in_start else rng.uniform(0.0, 1.0), in_start=in_start)


def check(workplace, uninterrupted, mesh: str, seed: int, kills: int) -> Workplace:
    return check_killed(
        workplace, uninterrupted, mesh, lambda place: killed_at_random(place, mesh, random.Random(seed), kills)
    )


def check_killed(workplace, uninterrupted, mesh: str, killed: Callable[[Workplace], None]) -> Workplace:
    losses, digest = uninterrupted(mesh)
    place = workplace(MESHES[mesh][0])
    place.write_averaged()
    killed(place)
    place.finish(*arguments(mesh))
    assert place.losses() == losses
    assert place.digest("step-24") == digest
    assert any(path.startswith("slots.ema.") for path in digest)
    assert '"eval/ema/loss"' in (place.folder / "logs" / "run" / "metrics.jsonl").read_text()
    assert all("unfinished" not in name for name in place.checkpoints())
    return place


def stop_and_kill(place: Workplace, mesh: str) -> None:
    stopped = place.stop(*arguments(mesh), at=7)
    assert "stopped by SIGTERM; saved as checkpoints/run/step-7" in stopped.out
    assert finished_checkpoints(place) == {"step-5", "step-7"}
    kill(place, mesh, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", one_of(["one device", "fsdp 8"]))
def test_stopped_and_then_killed(workplace, uninterrupted, mesh):
    before = time.time()
    place = check_killed(workplace, uninterrupted, mesh, lambda place: stop_and_kill(place, mesh))
    lines = read_lines(place.folder / "logs" / "run")
    goodput = account(lines)
    assert goodput is not None
    assert goodput.num_starts == 3
    ended = lines[-1]["started_unix_s"] + lines[-1]["elapsed_s"]
    assert goodput.wall_s == pytest.approx(ended - lines[0]["started_unix_s"], rel=0.005)
    # From the start of the first process to the end of the last one.
    assert before - 0.1 < lines[0]["started_unix_s"]
    assert (place.folder / "logs" / "run" / "metrics.jsonl").stat().st_mtime - 0.1 < ended < time.time() + 0.1
    assert goodput.seconds["restore"] > 0
    assert goodput.seconds["save"] > 0
    assert 0 < goodput.fraction < 1


@pytest.mark.soak  # CI kills them in tests/end_to_end/test_controllers.py
def test_two_processes_are_killed(two_processes, workplace):
    place = workplace()
    place.write()
    ends = place.run_all(2, "--config_path", "run.yaml", module="tests.end_to_end.dies", JAXLM_TEST_DIES_AT="14")
    assert all(end.code != 0 for end in ends), ends
    ends = place.run_all(2, "--config_path", "run.yaml")
    assert [end.code for end in ends] == [0, 0], ends
    assert re.search(r"resuming, from .*step-(5|10)$", ends[0].out, re.MULTILINE)
    assert (place.losses(), place.digest("step-24")) == (two_processes.losses, two_processes.digest)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
def test_killed_twice(workplace, uninterrupted, mesh):
    check(workplace, uninterrupted, mesh, seed=10, kills=2)


@pytest.mark.soak
def test_killed_with_tuned_options(workplace):
    """Every start compiles with the options that `jaxlm bench --tune` kept on this machine."""
    place = workplace()
    path = place.write()
    path.write_text(path.read_text().replace(f"{place.cache}/xla", "xla"))
    place.finish(*arguments("one device"), "--tune", "--steps", "6", module="tests.end_to_end.tunes_little")
    kept = place.folder / "xla" / "tuned_options.json"
    (entry,) = json.loads(kept.read_text())
    options = {"xla_cpu_prefer_vector_width": 512, "loss_chunk_tokens": 32}
    kept.write_text(json.dumps([{**entry, "options": options, "ratio": [1.1, 1.2, 1.3]}]))
    for run_id in ("whole", "killed"):
        words = (*arguments("one device"), "--trainer.id", run_id)
        if run_id == "killed":
            place.die(*words, at="second phase")
        finished = place.finish(*words)
        tuned = "xla_cpu_prefer_vector_width=512, loss_chunk_tokens=32: 1.20 times as fast as without (1.10 to 1.30)"
        assert tuned in finished.out
    assert place.losses("killed") == place.losses("whole")
    assert place.digest("step-24", "killed") == place.digest("step-24", "whole")
    kept.unlink()
    longer = place.run(*words, "--trainer.num_train_steps", "25")
    assert "XLA options: xla_cpu_prefer_vector_width=512 -> none (changes what follows: float rounding" in longer.out
    assert "block sizes: loss_chunk_tokens=32, " in longer.out


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("seed", range(100, 104))
def test_killed_five_times(workplace, uninterrupted, mesh, seed):
    check(workplace, uninterrupted, mesh, seed, kills=5)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["tp 2 x fsdp 4", "fsdp 8"])
def test_resumes_on_another_mesh(workplace, uninterrupted, mesh):
    """Started on one device and killed, finished on eight: the same batches, and the same losses within rounding."""
    losses, _ = uninterrupted("one device")
    place = workplace(1)
    place.write_averaged()
    place.die(*arguments("one device"), at="second phase")
    elsewhere = replace(place, devices=8)
    finished = elsewhere.finish(*arguments(mesh))
    assert re.search(r"resuming, from .*step-(5|10)$", finished.out, re.MULTILINE)
    check_close(place.losses(), losses)
