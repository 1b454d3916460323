"""Signals at random moments, also twice: the run ends as documented, leaves nothing behind, and resumes bit for bit."""

import hashlib
import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.end_to_end.commands import Workplace, end_of

MOMENTS = 10  # of each of the four tests
RUN = ("--config_path", "run.yaml")
OFTEN = ("--trainer.checkpointer.save_interval", "1s")
IMPORTED_HERE = {"PYTHONUNBUFFERED": "1"}  # not by the fork server
SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXPORTS = "hf_save_path: exports\nhf_save_steps: 6\n"
PLACES = ("import", "start", "any", "compile", "save", "eval", "export")
MODULE = "tests.end_to_end.signaled_in"


def interrupted(place: Workplace, at: str, rng: random.Random, twice: bool, module: str) -> tuple[str, int, str]:
    """Starts the run and signals it. Returns what was done, the exit code and the errors."""
    number, gap = rng.choice(SIGNALS), rng.uniform(0.0, 1.9) if twice else None
    if at in ("import", "start", "any"):
        process = place.start(*RUN, *OFTEN, **IMPORTED_HERE)
        # Before a tenth of a second, Python itself is starting.
        time.sleep(rng.uniform(*{"import": (0.3, 1.5), "start": (1.5, 5.0), "any": (4.0, 12.0)}[at]))
        process.send_signal(number)
        if gap is not None:
            time.sleep(gap)
            process.send_signal(number)
    else:
        parts = (
            at,
            int(number),
            2 if at == "save" else 1,
            f"{rng.uniform(0, 0.1):.3f}",
            "" if gap is None else f"{gap:.3f}",
        )
        process = place.start(
            *RUN,
            *OFTEN,
            module=module,
            JAXLM_TEST_SIGNALS=":".join(map(str, parts)),
            **IMPORTED_HERE,
        )
    code, _, err = end_of(process)
    assert no_process_is_left(place.folder)
    return f"{at} {number.name} {gap}", code, err


def no_process_is_left(folder: Path) -> bool:
    """Whether within some seconds no process works in the folder."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not any(works_in(process, folder) for process in Path("/proc").glob("[0-9]*")):
            return True
        time.sleep(0.1)
    return False


def works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink() == folder
    except OSError:  # it has ended, or is another user's
        return False


def exported(place: Workplace) -> dict[str, str]:
    """Path -> hash of the exported files. The model card has the metrics of the newest evaluation in this process."""
    root = place.folder / "exports"
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "README.md")
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.soak
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_signals_at_random_moments(workplace, twice):
    def make() -> Workplace:
        place = workplace()
        place.write(EXPORTS)
        return place

    check_random_signals(make, PLACES, MODULE, twice)


def check_random_signals(make: Callable[[], Workplace], places: Sequence[str], module: str, twice: bool) -> None:
    """Signals runs again and again.

    Args:
        make: makes a new run.
        places: where it gets its signals, in turn.
        module: sends signals inside one kind of work.
    """
    whole, place, rng = make(), make(), random.Random(29 + twice)
    assert whole.run(*RUN).code == 0
    last = f"step-{max(whole.losses())}"
    codes = []
    for moment in range(MOMENTS):
        where = places[moment % len(places)]
        did, code, err = interrupted(place, where, rng, twice, module)
        print(json.dumps([did, code, err[-300:]]), flush=True)
        if where in ("compile", "save", "eval", "rollout", "export"):
            # A run that goes on may have ended before it got there.
            assert (place.folder / "signaled").exists() or code == 0, (did, err)
            (place.folder / "signaled").unlink(missing_ok=True)
        expected = {0, *(-n for n in SIGNALS), *(128 + n for n in SIGNALS)}  # a shell shows -n as 128 + n
        assert code in expected, (did, err)
        assert "Traceback" not in err, (did, err)
        codes.append(code)
        if last in place.checkpoints():  # it is complete: the next moments need another run
            check(place, whole, last)
            place = make()
    assert any(codes)
    check(place, whole, last)


def check(place: Workplace, whole: Workplace, last: str) -> None:
    place.finish(*RUN)
    assert place.losses() == whole.losses()
    assert place.digest(last) == whole.digest(last)
    assert exported(place) == exported(whole)
    left = [p for p in place.folder.rglob("*") if "unfinished" in p.name or p.name.endswith(".tmp")]
    assert not left
