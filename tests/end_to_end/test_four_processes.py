"""Four processes train like one: each reads only its own rows, and together they read each row once."""

import json
import signal

import pytest

from tests.end_to_end.commands import Workplace, end_of

STEPS, ROWS = 8, 16
RUN = ("--config_path", "run.yaml", "--trainer.num_train_steps", str(STEPS), "--optimizer.learning_rate", "1.0e-3")


def numbers(place: Workplace) -> dict[tuple[int, str], float]:
    records = place.records()
    names = ("train/loss", "eval/loss", "grad/norm/total")
    return {(record["step"], name): record[name] for record in records for name in names if name in record}


def reads(place: Workplace, kind: str) -> list[list[list[int]]]:
    """For each process, the rows of each batch."""
    found = []
    for number in range(4):
        lines = (place.folder / f"reads-{number}.jsonl").read_text().splitlines()
        found.append([record["rows"] for record in map(json.loads, lines) if record["kind"] == kind])
    return found


@pytest.mark.soak
def test_each_row_is_read_by_one_process_and_losses_equal_those_of_a_single_process(workplace):
    alone, four = workplace(1), workplace(1)
    for place in (alone, four):
        place.write()
    alone.finish(*RUN)
    processes = four.start_all(4, *RUN, module="tests.end_to_end.reading", JAXLM_TEST_READS="reads")
    for code, _, err in [end_of(process) for process in processes]:
        assert code == 0, err

    expected, found = numbers(alone), numbers(four)
    assert found.keys() == expected.keys()
    assert len([key for key in found if key[1] == "train/loss"]) == STEPS
    assert max(abs(found[key] / expected[key] - 1) for key in expected) < 1e-5

    batches = reads(four, "train")
    assert all(len(rows) == ROWS // 4 for process in batches for rows in process)
    assert all(len(process) >= STEPS for process in batches)
    for number in range(STEPS):
        together = [row for process in batches for row in process[number]]
        assert sorted(together) == list(range(number * ROWS, (number + 1) * ROWS))
    own = [[row for rows in process for row in rows] for process in batches]
    assert all(len(rows) == len(set(rows)) for rows in own)

    evaluated = reads(four, "eval")
    assert len({len(process) for process in evaluated}) == 1
    for rows in zip(*evaluated, strict=True):
        together = [row for part in rows for row in part]
        assert len(together) == len(set(together)) == ROWS


@pytest.mark.soak  # of two processes in tests/end_to_end/test_signals.py
def test_a_signal_to_one_of_four_processes_saves_all_at_the_same_step(workplace):
    place = workplace(1)
    place.write()
    number = f"{int(signal.SIGTERM)}:2:7"  # process 2, at step 7
    ends = [
        end_of(process)
        for process in place.start_all(
            4, "--config_path", "run.yaml", module="tests.end_to_end.signaled", JAXLM_TEST_SIGNAL=number
        )
    ]
    assert [code for code, _, _ in ends] == [143] * 4, ends
    step = max(int(name.removeprefix("step-")) for name in place.checkpoints())
    saved = f"step-{step}"
    assert 7 <= step <= 11
    assert f"stopped by SIGTERM; saved as checkpoints/run/{saved}." in ends[0][1]  # process 0 speaks for all
    assert [err for _, _, err in ends if "Traceback" in err] == []
    more = ("--trainer.num_train_steps", str(step + 2))
    ends = place.run_all(4, "--config_path", "run.yaml", *more)
    assert [code for code, _, _ in ends] == [0] * 4, ends
    assert f"resuming, from checkpoints/run/{saved}" in ends[0][1]
