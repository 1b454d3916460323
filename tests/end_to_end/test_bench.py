"""`python -m jaxlm bench`: a configuration's speed and memory, as a table and as one JSON line."""

import json
import re

import pytest

from jaxlm.commands.bench import main

KEYS = {"tokens_per_second", "mfu", "step_seconds", "compile_seconds", "peak_bytes", "kernels"}


@pytest.fixture(scope="module")
def measured(workplace):
    place = workplace(2)
    place.write()
    done = place.finish("--config_path", "run.yaml", "--steps", "3", "--warmup", "1", module="jaxlm.commands.bench")
    return place, json.loads(done.out.splitlines()[-1]), done.out


@pytest.mark.slow
def test_bench_shows_a_table_and_a_line_of_json_and_needs_no_data(measured):
    place, numbers, text = measured
    assert text.count("unknown") == 1, "the peak, in the table"
    assert sorted(path.name for path in place.folder.iterdir()) == ["run.yaml"]
    assert numbers.keys() >= KEYS
    assert numbers["tokens_per_second"] == pytest.approx(16 * 32 / numbers["step_seconds"])
    assert 0 < numbers["host_seconds"] <= numbers["step_seconds"]
    assert numbers["mfu"] is None, "the peak of a CPU is not known"
    assert 0 < numbers["mfu_attainable"] < 1
    assert numbers["peak_bytes"] > 1 << 20
    assert sum(numbers["products"].values()) == pytest.approx(1)
    assert re.search(r"products +[A-Z]\w+ f32 \d+%", text)
    assert set(numbers["collectives"]) == {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps must be at least 1"),
        (("--nonsense.x", "1"), "nonsense"),
        (("--dry_run", "true"), "dry_run: true has no effect here: jaxlm bench measures steps"),
    ],
)
def test_invalid_arguments_are_refused(workplace, in_process, arguments, message):
    place = workplace()
    place.write()
    done = in_process(main, place, "--config_path", "run.yaml", *arguments)
    assert done.code == 2
    assert message in done.err
