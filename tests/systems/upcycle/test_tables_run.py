"""The tables of a run and its teacher: after training, and by the command."""

import csv
import json
import shutil

import numpy as np
import pytest

from jaxlm.systems.upcycle.commands.tables import main
from jaxlm.train import main as train
from tests.end_to_end.commands import Workplace

BIG = ("--model.hidden_dim", "64", "--model.num_layers", "3", "--trainer.id", "big", "--trainer.num_train_steps", "10")
LATENCY = "{type: latency, prompt_tokens: [8, 20], new_tokens: [4], warmup: 1, runs: 2}"
TABLES = f"""
refs: {{{{teacher: {{{{type: hf, path: {{teacher}}, dtype: float32}}}}}}}}
tables:
  - {{{{type: perplexity, batches: 2}}}}
  - {LATENCY.replace("{", "{{").replace("}", "}}")}
  - {{{{type: memory, contexts: [16, 32]}}}}
"""
FILES = {
    *("perplexity.csv", "perplexity.tex", "perplexity_vs_context.png", "latency.csv", "latency.tex"),
    *("latency_vs_context.png", "memory.csv", "memory.tex", "memory_scaling.png", "tables.json"),
}
WRITTEN = "logs/run/tables"


def rows(place: Workplace, name: str, folder: str = WRITTEN) -> list[dict[str, str]]:
    with (place.folder / folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def teacher(workplace):
    """A bigger model in Hugging Face format."""
    place = workplace()
    place.write()
    place.finish("--config_path", "run.yaml", *BIG, "--hf_save_path", "hf", "--hf_save_steps", "1000")
    (folder,) = (place.folder / "hf").glob("step-*")
    return folder


@pytest.fixture(scope="module")
def written(workplace, teacher) -> Workplace:
    """A run that has written its tables. Do not change it."""
    place = workplace()
    place.write(TABLES.format(teacher=teacher))
    place.finish("--config_path", "run.yaml")
    return place


@pytest.mark.slow
def test_training_writes_the_tables_of_both_models(written):
    assert {path.name for path in (written.folder / WRITTEN).iterdir()} == FILES
    assert all((written.folder / WRITTEN / name).stat().st_size > 1000 for name in FILES if name.endswith(".png"))
    student, teacher = rows(written, "perplexity")
    assert (student["model"], teacher["model"]) == ("run", "teacher")
    assert student["tokens"] == teacher["tokens"]
    logged = next(r for r in reversed(written.records()) if "eval/loss" in r)  # over as many batches
    np.testing.assert_allclose(float(student["loss"]), logged["eval/loss"], rtol=1e-6)
    np.testing.assert_allclose(float(student["perplexity"]), np.exp(logged["eval/loss"]), rtol=1e-5)
    prompts = [(row["model"], row["prompt_tokens"], row["samples"]) for row in rows(written, "latency")]
    assert prompts == [(model, prompt, "2") for model in ("run", "teacher") for prompt in ("8", "20")]
    for model, layers, head_size in (("run", 2, 8), ("teacher", 3, 16)):
        sizes = {r["cache"]: int(r["kv_bytes_per_token"]) for r in rows(written, "memory") if r["model"] == model}
        values = layers * 2 * 2 * head_size
        assert sizes == {"bfloat16": 2 * values, "int8": values + layers * 2 * 2 * 4}
    about = json.loads((written.folder / WRITTEN / "tables.json").read_text())
    assert about["models"]["run"]["step"] == 24
    assert list(about["columns"]["perplexity"]) == list(student)


@pytest.mark.slow
def test_the_command_measures_the_same_model(written):
    options = ("--checkpoint", "checkpoints/run/step-24", "--output_dir", "paper")
    result = written.finish("--config_path", "run.yaml", *options, module="jaxlm.systems.upcycle.commands.tables")
    assert result.out.splitlines()[-1] == "tables: paper"
    for name in ("perplexity", "memory"):
        assert rows(written, name, "paper") == rows(written, name)


@pytest.mark.slow
def test_tables_are_measured_once_unless_they_change(written, workplace):
    place = workplace()
    shutil.copytree(written.folder, place.folder, dirs_exist_ok=True)
    assert f"tables: {WRITTEN}, written before" in place.finish("--config_path", "run.yaml").out
    changed = ("--tables", "[{type: memory, contexts: [8], name: small}]")
    assert "measuring small of teacher" in place.finish("--config_path", "run.yaml", *changed).out
    assert {row["context"] for row in rows(place, "small")} == {"8"}


@pytest.mark.slow
def test_tables_that_fail_do_not_cost_the_run(workplace):
    place = workplace()
    place.write("tables: [{type: perplexity, batches: 1, repeats: 1000}]")
    result = place.finish("--config_path", "run.yaml", "--trainer.num_train_steps", "4")
    assert "warning: no tables (ConfigError: tables: type perplexity: 1000 repeats of 1 batches given" in result.out
    assert place.checkpoints()[-1] == "step-4"
    assert not (place.folder / WRITTEN).exists()


@pytest.mark.soak
@pytest.mark.parametrize(("devices", "processes"), [(8, 1), (1, 2)])
def test_devices_and_processes_measure_together(written, workplace, teacher, devices, processes):
    place = workplace(devices)
    place.write(TABLES.format(teacher=teacher))
    ends = place.run_all(processes, "--config_path", "run.yaml")
    assert [end.code for end in ends] == [0] * processes, ends
    assert {path.name for path in (place.folder / WRITTEN).iterdir()} == FILES
    for ours, theirs in zip(rows(place, "perplexity"), rows(written, "perplexity"), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        np.testing.assert_allclose(float(ours["loss"]), float(theirs["loss"]), rtol=1e-4)
    shares = devices * processes
    for ours, theirs in zip(rows(place, "memory"), rows(written, "memory"), strict=True):
        assert int(ours["kv_bytes"]) == shares * int(theirs["kv_bytes"])
        assert ours["kv_bytes_per_device"] == theirs["kv_bytes"]


# What is refused before anything is compiled


@pytest.mark.parametrize(
    ("extra", "options", "message"),
    [
        ("", (), "tables: empty, so there is nothing to measure"),
        ("tables: [{type: memory}]", (), "tables.0.contexts: null given, but the models read at most 32 tokens"),
        ("tables: [{type: memory, contexts: [8]}]", ("--dry_run", "true"), "dry_run: true has no effect here"),
        ("tables: [{type: memory, contexts: [8]}]", (), "checkpoints/other has no checkpoint of this run"),
        ("tables: [{type: memory, context: [8]}]", (), "Did you mean 'contexts'"),
        ("tables: [{type: memory, contexts: [8]}]", ("--checkpoint", "checkpoints/run/step-1"), "no checkpoint found"),
    ],
)
def test_the_command_refuses(workplace, in_process, extra, options, message):
    place = workplace()
    place.write(extra)
    result = in_process(main, place, "--config_path", "run.yaml", "--trainer.id", "other", *options)
    assert result.code == 2
    assert message in result.err


@pytest.mark.soak
def test_a_damaged_checkpoint_is_refused(again, in_process):
    checkpoint = again.folder / "checkpoints" / "run" / "step-24"
    (checkpoint / "run" / "config.yaml").write_text("data: {}\n")
    tables = ("--tables", "[{type: memory, contexts: [8]}]")
    result = in_process(main, again, "--config_path", "run.yaml", *tables)
    assert result.code == 2
    assert "step-24: the checkpoint is damaged" in result.err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "tables: [{type: latency, prompt_tokens: [40]}]",
            "tables.0.prompt_tokens: 40 given, but lengths from 1 to 30",
        ),
        ("tables: [{type: perplexity}]\nrefs: {run: {type: hf, path: nowhere}}", "refs.run"),
        ("refs: {teacher: {type: hf, path: nowhere}}", "or compare it in tables"),
    ],
)
def test_a_run_whose_tables_would_fail_does_not_start(workplace, in_process, extra, message):
    place = workplace()
    place.write(extra)
    result = in_process(train, place, "--config_path", "run.yaml")
    assert result.code == 2
    assert message in result.err
