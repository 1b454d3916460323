"""Damage, and kills during saves: the newest intact checkpoint is used, and none is ever incomplete."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from jaxlm.engine.checkpoint.manifest import DamagedError, verify
from tests.end_to_end.commands import Workplace
from tests.end_to_end.test_storage_faults import faulty
from tests.tiers import one_of

RUN = ("--config_path", "run.yaml")


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


DAMAGES = {"truncated": truncate, "flipped": flip, "deleted": Path.unlink}


@pytest.mark.slow
@pytest.mark.parametrize("damage", one_of(DAMAGES))
def test_any_damage_to_any_file_is_detected(again, damage):
    newest = again.folder / "checkpoints/run/step-24"
    verify(newest)
    for path in files_of(newest):
        content = path.read_bytes()
        if content or damage == "deleted":
            DAMAGES[damage](path)
            with pytest.raises(DamagedError):
                verify(newest)
            path.write_bytes(content)
    verify(newest)


def check_falls_back(uninterrupted, workplace, number: int, damage: str) -> None:
    place = workplace()
    shutil.copytree(uninterrupted.place.folder, place.folder, dirs_exist_ok=True)
    path = files_of(place.folder / "checkpoints/run/step-24")[number]
    if not path.stat().st_size:
        damage = "deleted"
    DAMAGES[damage](path)
    result = place.finish(*RUN)
    lines = [line for line in result.out.splitlines() if "damaged" in line]
    assert len(lines) == 1
    assert "step-24" in lines[0]
    assert "step-20" in result.out
    assert "step-24.damaged" in place.checkpoints()
    assert (place.losses(), place.digest("step-24")) == (uninterrupted.losses, uninterrupted.digest)


@pytest.mark.soak
@pytest.mark.parametrize(("number", "damage"), [(3, "flipped"), pytest.param(5, "deleted", marks=pytest.mark.soak)])
def test_a_damaged_newest_checkpoint_is_set_aside(uninterrupted, workplace, number, damage):
    check_falls_back(uninterrupted, workplace, number, damage)


@pytest.mark.soak
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_file_of_the_newest_checkpoint_in_turn(uninterrupted, workplace, damage):
    for number in range(len(files_of(uninterrupted.place.folder / "checkpoints/run/step-24"))):
        check_falls_back(uninterrupted, workplace, number, damage)


@pytest.mark.slow
def test_if_all_checkpoints_are_damaged_the_run_does_not_start_over(again):
    for checkpoint in (again.folder / "checkpoints/run").iterdir():
        truncate(checkpoint / "run" / "manifest.json")
    before = again.checkpoints()
    for _ in range(2):  # a scheduler starts the run again
        result = again.run(*RUN)
        assert result.code == 1
        assert "every checkpoint in" in result.err
        assert "is damaged:" in result.err
        assert "Traceback" not in result.err
        assert again.checkpoints() == before


EVERY_STEP = ("--trainer.checkpointer.keep", "[{every: 1}]")


def saves_begun(folder: Path, since: float) -> set[str]:
    """Names of unfinished saves that began after the given time; leftovers of earlier kills do not count."""
    names = set()
    for path in folder.glob("step-*.unfinished"):
        try:
            if path.stat().st_ctime > since:
                names.add(path.name)
        except FileNotFoundError:  # it has just finished
            continue
    return names


def killed_inside_saves(place: Workplace, rng: random.Random, kills: int) -> int:
    """Kills a run again and again; returns how many of the kills hit a save, at most `kills`."""
    folder = place.folder / "checkpoints/run"
    inside = saved = 0
    while inside < kills:
        since = time.time()
        process = place.start(*RUN, *EVERY_STEP)
        # Any of its first saves: if every process died in its first save, the run would make no progress.
        num_saves, seen = rng.randint(1, 4), set()
        while process.poll() is None and len(seen) < num_saves:
            seen |= saves_begun(folder, since)
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break
        inside += bool(saves_begun(folder, since))
        numbers = [int(n.removeprefix("step-")) for n in place.checkpoints() if "." not in n]
        for name in numbers:
            verify(folder / f"step-{name}")
        assert max(numbers, default=0) >= saved
        saved = max(numbers, default=0)
    return inside


def check_kills_while_saving(uninterrupted, workplace, seed: int, kills: int) -> None:
    """Saves every step and kills the run during saves; it must end like the run that was never killed."""
    rng = random.Random(seed)
    while kills > 0:
        place = workplace()
        place.write()
        kills -= killed_inside_saves(place, rng, kills)
        place.finish(*RUN, *EVERY_STEP)
        assert (place.losses(), place.digest("step-24")) == (uninterrupted.losses, uninterrupted.digest)
        # The checkpoint before the phase began is temporary; all others are kept, and nothing else remains.
        assert place.checkpoints() == sorted(f"step-{n}" for n in range(1, 25))


@pytest.mark.slow
def test_killed_while_saving(uninterrupted, workplace):
    check_kills_while_saving(uninterrupted, workplace, seed=5, kills=2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_killed_while_saving_thirty_times(uninterrupted, workplace, seed):
    check_kills_while_saving(uninterrupted, workplace, seed=seed, kills=30)


@pytest.mark.soak
def test_every_process_reports_the_checkpoint_that_process_0_commits(workplace):
    place = workplace()
    place.write()
    ends = place.run_all(2, *RUN, module="tests.end_to_end.slow_to_commit")
    assert ["ends with checkpoints/run/step-24\n" in end.out for end in ends] == [True, True], ends


@pytest.mark.soak
def test_a_second_start_of_a_running_run_ends_with_a_message_and_does_no_harm(uninterrupted, workplace):
    place = workplace()
    place.write()
    # The first one waits for the second.
    first = place.start(*RUN, *EVERY_STEP, **faulty("none", 0))
    while first.poll() is None and "step-5" not in place.checkpoints():
        time.sleep(0.01)
    second = place.run(*RUN)
    (place.folder / "go").touch()
    _, err = first.communicate(timeout=300)
    assert second.code == 2
    assert f"already being trained (process {first.pid} on" in second.err
    assert first.returncode == 0, err
    assert (place.losses(), place.digest("step-24")) == (uninterrupted.losses, uninterrupted.digest)
