"""Runs whose teacher is gone when no phase that is left reads it. Runs the trainer in this process, on eight devices."""

import csv
import json
import shutil

import pytest

from jaxlm.core.errors import ConfigError
from tests.session.test_gates import DISTILL, Verified

LEFT_OUT = "the tables will lack refs.teacher, which cannot be read: refs.teacher.path: "


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    return Verified(tmp_path_factory.mktemp("past"))


@pytest.mark.soak
def test_tables_lack_a_teacher_that_is_gone(trainings):
    shutil.copytree(trainings.folder / "good", trainings.folder / "left")
    tables = trainings.folder / "logs" / "left" / "tables"

    def run(num_steps):
        phases = [
            {"name": "a", "num_train_steps": 2, "objective": DISTILL},
            {"name": "b", "num_train_steps": num_steps},
        ]
        trainings.run(
            "left",
            2 + num_steps,
            refs=trainings.ref("left"),
            phases=phases,
            tables=[{"type": "perplexity", "batches": 1}],
        )
        with (tables / "perplexity.csv").open(newline="") as file:
            rows = [row["model"] for row in csv.DictReader(file)]
        assert rows == list(json.loads((tables / "tables.json").read_text())["models"])
        return rows

    assert run(2) == ["left", "teacher"]
    assert "warning" not in trainings.output
    run(2)
    assert "written before" in trainings.output
    assert LEFT_OUT not in trainings.output
    shutil.rmtree(trainings.folder / "left")
    assert run(2) == ["left", "teacher"], "tables that are there are not replaced by tables with less"
    assert "written before" in trainings.output

    assert run(4) == ["left"]
    lines = (LEFT_OUT, "phase 'b': parameters", "the tables lack refs.teacher")
    places = [trainings.output.index(line) for line in lines]
    assert places == sorted(places)
    assert run(4) == ["left"]
    assert "written before" in trainings.output

    shutil.copytree(trainings.folder / "good", trainings.folder / "left")
    assert run(4) == ["left", "teacher"]
    assert LEFT_OUT not in trainings.output


@pytest.mark.slow
def test_a_teacher_that_a_phase_still_reads_must_be_there(trainings):
    with pytest.raises(ConfigError, match=r"refs\.teacher\.path: "):
        trainings.run("none", 2, refs=trainings.ref("nowhere"), objective=DISTILL, tables=[{"type": "perplexity"}])
