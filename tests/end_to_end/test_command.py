"""The command as users see it: finishing, running again, continuing, and errors."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from jaxlm import train
from jaxlm.commands import sample
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.page.page import render
from tests.observe.page_reader import Page, check_numbers
from tests.tiers import one_of

RUN = ("--config_path", "run.yaml")


def test_files_of_a_finished_run(finished):
    logs = finished.folder / "logs" / "run"
    assert {path.name for path in logs.iterdir()} == {
        *("config.yaml", "environment.json", "goodput.jsonl", "metrics.jsonl", "train.log", "events.jsonl"),
        *("loss.png", "schedule.png", "step_time.png", "report.html"),
    }
    for picture in logs.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    step = next(r for r in records if r["step"] == 5)
    assert {"train/loss", "optim/learning_rate", "throughput/tokens_per_second", "grad/norm/total"} <= step.keys()
    assert step["global_step"] == 5
    assert step["run_progress"] == 5 / 24
    assert step["throughput/total_tokens"] == 5 * 16 * 32
    evals = [r for r in records if "eval/loss" in r]
    assert [r["step"] for r in evals] == [9, 18, 24]
    assert all({"eval/loss", "eval/bpb"} <= r.keys() for r in evals)
    events = [json.loads(line) for line in (logs / "events.jsonl").read_text().splitlines()]
    counts = {r["step"]: r["train/skipped_steps"] for r in records if "train/loss" in r}
    skips = [(step, "skip") for step, count in counts.items() if count > counts.get(step - 1, 0)]
    assert [(event["step"], event["type"]) for event in events] == [(0, "start"), (0, "phase"), *skips]
    text = (logs / "train.log").read_text()
    for part in (
        "devices",
        "mesh",
        "FLOPs per token",
        "attention",
        "compiling",
        "step 24/24",
        "gzip -9",
        "xz -9",
        "to sample",
        "step time",
    ):
        assert part in text
    saved = finished.folder / "checkpoints" / "run" / "step-24"
    assert {path.name for path in saved.iterdir()} == {"state", "run", "data", "checksums.json"}
    assert (saved / "run" / "tokenizer" / "tokenizer.json").is_file()


def test_every_number_of_its_page_is_that_of_its_files(finished):
    logs = finished.folder / "logs" / "run"
    check_numbers(logs, Page(render([read_run(str(logs))], 24.0)))


@pytest.mark.slow
def test_running_again_reports_that_the_run_is_complete(again):
    losses = again.losses()
    result = again.finish(*RUN)
    assert "the run is complete: all 24 steps are done" in result.out
    assert re.search(r"starts from +checkpoints/run/step-24 \(step 24\)\n", result.out)
    assert re.search(r"starts from +step 0, with random weights\n", (again.folder / "logs/run/train.log").read_text())
    assert again.losses() == losses


@pytest.mark.slow
def test_more_steps_continue_from_the_checkpoint(again):
    before = again.losses()
    result = again.finish(*RUN, "--trainer.num_train_steps", "27")
    assert "trainer.num_train_steps: 24 -> 27" in result.out
    assert "spans steps 0 to 27 instead of 0 to 24" in result.out
    assert {step: loss for step, loss in again.losses().items() if step <= 24} == before
    assert sorted(again.losses()) == list(range(1, 28))
    records = again.records()
    assert records[-1]["step"] == 27
    assert next(r for r in records if r["step"] == 27)["throughput/total_tokens"] == 27 * 16 * 32


def test_a_checkpoint_of_another_shape_names_the_parameter_and_both_shapes(again, in_process):
    # Edits the saved configurations so that the names no longer show the difference.
    shutil.rmtree(again.folder / "logs")
    run = again.folder / "checkpoints" / "run"
    for name in again.checkpoints():
        if name != "step-24":
            shutil.rmtree(run / name)
    config = run / "step-24" / "run" / "config.yaml"
    config.write_text(config.read_text().replace("intermediate_dim: 64", "intermediate_dim: 96"))
    from jaxlm.engine.checkpoint.manifest import seal

    seal(run / "step-24")
    result = in_process(train.main, again, *RUN, "--model.intermediate_dim", "96")
    assert result.code == 2
    assert "gate_proj.weight: checkpoint float32[2, 64, 32], this model float32[2, 96, 32]" in result.err


def test_a_cache_of_another_tokenizer_is_refused(again, in_process):
    result = in_process(train.main, again, *RUN, "--trainer.id", "other", "--data.vocab_size", "290")
    assert result.code == 2
    assert "cache_dir" in result.err
    assert "vocab_size" in result.err


def test_a_log_folder_that_cannot_be_written_is_an_error_before_compiling(workplace, in_process):
    place = workplace()
    place.write()
    (place.folder / "logs").write_text("a file where the folder should be")
    result = in_process(train.main, place, *RUN)
    assert result.code == 2
    assert "trainer.log_dir" in result.err
    assert "compiling" not in result.out


@pytest.mark.parametrize("name", ["decisions.jsonl", "metrics.jsonl", "config.yaml"])
def test_a_log_file_that_cannot_be_written_is_an_error_before_compiling(workplace, in_process, name):
    place = workplace()
    place.write()
    (place.folder / "logs" / "run" / name).mkdir(parents=True)
    result = in_process(train.main, place, *RUN)
    assert result.code == 2, result.err
    assert f"error: trainer.log_dir: logs/run/{name} cannot be read and written (Is a directory)" in result.err
    assert "compiling" not in result.out


def test_a_checkpoint_folder_that_cannot_be_written_is_an_error_before_compiling(workplace, in_process):
    place = workplace()
    place.write()
    (place.folder / "checkpoints").write_text("a file where the folder should be")
    result = in_process(train.main, place, *RUN)
    assert result.code == 2
    assert "trainer.checkpointer.base_path: cannot write to" in result.err
    assert "compiling" not in result.out


@pytest.mark.soak  # without the earlier run in tests/end_to_end/test_storage_faults.py
@pytest.mark.parametrize(
    ("place", "message"),
    [("sealing", r"No space left.*Free up disk space and run"), ("writing arrays", "File too large")],
)
def test_a_full_disk_stops_the_run_and_loses_no_finished_checkpoint(again, place, message):
    full = {"module": "tests.end_to_end.full_disk", "JAXLM_TEST_DISK_FULL": place}
    result = again.run(*RUN, "--trainer.num_train_steps", "36", "--trainer.checkpointer.retry_for", "0", **full)
    assert result.code == 1
    assert re.search(message, result.err)
    assert "Traceback" not in result.err
    assert "step-24" in again.checkpoints()
    again.finish(*RUN, "--trainer.num_train_steps", "36")
    assert all("unfinished" not in name for name in again.checkpoints())


@pytest.mark.slow
def test_sample_needs_only_the_checkpoint(finished, in_process):
    arguments = ("--checkpoint", "checkpoints/run", "--prompt", "def ", "--prompt", "import ")
    result = finished.finish(*arguments, module="jaxlm.commands.sample")
    assert result.out.count("---") == 2
    missing = in_process(sample.main, finished, "--checkpoint", "checkpoints/rum")
    assert missing.code == 2
    assert "checkpoints/run" in missing.err


@pytest.mark.slow
def test_a_dry_run_needs_no_data(workplace):
    place = workplace()
    path = place.write()
    path.write_text(
        path.read_text().replace(str(place.corpus), "/nowhere").replace(str(place.cache), "/nowhere/either")
    )
    tokenizer = ("--data.tokenizer", "/nowhere/tokenizer.json")
    result = place.run(*RUN, "--dry_run", "true", *tokenizer, "--trainer.compilation_cache_dir", "null")
    assert result.code == 2
    assert "memory per device" in result.out
    assert "schedule" in result.out
    for refused in (
        "data.tokenizer: '/nowhere/tokenizer.json': no tokenizer.json",
        "data.train_urls[0]: '/nowhere/train'",
    ):
        assert f"a start would end with: {refused}" in result.out
        assert f"a start would end with: {refused}" in result.err
    assert (
        "dry run complete: all training steps compile, but a start would not get that far: see tokenizer" in result.out
    )
    written = [path.relative_to(place.folder) for path in place.folder.rglob("*") if path.is_file()]
    assert sorted(map(str, written)) == ["logs/run/schedule.png", "run.yaml"]  # only the plot


@pytest.mark.soak
def test_a_dry_run_of_two_processes_checks_what_a_start_checks(workplace):
    place = workplace()
    place.write()
    arguments = (*RUN, "--dry_run", "true", "--trainer.initialize_from", "no-run")
    for code, out, err in place.run_all(2, *arguments):
        assert code == 2, err
        assert "a start would end with: trainer.initialize_from: no checkpoint at no-run" in err
        if "plan (dry run" in out:  # process 0 speaks for all
            assert "a start would end with: trainer.initialize_from: no checkpoint at no-run" in out
            assert "but a start would not get that far: see start in the table" in out


def test_help_names_every_section(workplace, in_process):
    result = in_process(train.main, workplace(), "--help", "all")
    assert result.code == 0
    for option in ("--data.train_urls", "--trainer.train_batch_size", "--model.num_kv_heads", "--optimizer.beta2"):
        assert option in result.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("jaxlm.train", ("--config_path", "run.yaml", "--trainer.num_train_steps", "28")),
        pytest.param("jaxlm.commands.bench", ("--config_path", "run.yaml", "--steps", "1"), marks=pytest.mark.soak),
        pytest.param("jaxlm.commands.sample", ("--checkpoint", "checkpoints/run"), marks=pytest.mark.soak),
        pytest.param("jaxlm.commands.chat", ("--checkpoint", "checkpoints/run"), marks=pytest.mark.soak),
        pytest.param("jaxlm.commands.evaluate", ("--checkpoint", "checkpoints/run"), marks=pytest.mark.soak),
        pytest.param(
            "jaxlm.commands.convert",
            ("to-hf", "--checkpoint", "checkpoints/run", "--output_dir", "out"),
            marks=pytest.mark.soak,
        ),
    ],
)
@pytest.mark.parametrize("platform", one_of(["cuda", "nonsense"]))
def test_devices_that_cannot_be_opened_are_one_message(finished, module, arguments, platform):
    if platform == "cuda" and any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("jax for GPUs is installed")
    result = finished.run(*arguments, module=module, JAX_PLATFORMS=platform)
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert f"Asked for: JAX_PLATFORMS={platform}. Installed: jaxlib " in result.err
    assert "pip install 'jax[cuda13]" in result.err
    assert "unset JAX_PLATFORMS" in result.err


@pytest.mark.slow
def test_variables_that_jax_does_not_accept_are_one_message():
    command = [sys.executable, "-m", "jaxlm", "train", "--config_path", "jaxlm:quickstart.yaml"]
    for variable in ("JAX_ENABLE_X64=perhaps", "JAX_NUM_CPU_DEVICES=x"):
        name, _, value = variable.partition("=")
        result = subprocess.run(command, env=os.environ | {name: value}, capture_output=True, text=True)
        assert result.returncode == 2
        assert result.stderr.startswith("error: jax cannot be imported: ")
        assert variable in result.stderr


CACHES_ALL = {"module": "tests.end_to_end.caches_all"}
WATCHED = ("--trainer.jax_config", "{jax_log_compiles: true, jax_transfer_guard_device_to_host: disallow}")
FRESH = ("--config_path", "run.yaml", "--trainer.compilation_cache_dir", "xla", "--trainer.num_train_steps", "8")


@pytest.mark.slow
def test_a_run_traces_and_compiles_once_and_a_second_start_does_not_compile(workplace):
    """Also checks that all fetches from devices are explicit."""
    place = workplace()
    place.write("evals: []")
    first, second = (place.run(*FRESH, *WATCHED, "--trainer.id", name, **CACHES_ALL) for name in ("one", "two"))
    for done in (first, second):
        assert done.code == 0, done.err
        assert done.err.count("Finished tracing train_step") == 1
        assert done.err.count("Compiling jit(train_step)") == 1
    hit = "Persistent compilation cache hit for 'jit_train_step'"
    assert (hit in first.err, hit in second.err) == (False, True)
    assert place.losses("one") == place.losses("two")


TWO_PHASES = """
evals: []
phases:
  - {name: pretrain, num_train_steps: 4}
  - name: adapt
    num_train_steps: 4
    surgery: [{type: lora, target: attn, rank: 2}]
    trainable: ['\\.[ab]$']
"""


@pytest.mark.soak
def test_a_start_compiles_no_step_that_its_dry_run_compiled(workplace):
    """Three programs: of two batch sizes, and of the phase after."""
    place = workplace()
    text = place.write(TWO_PHASES, num_steps=8).read_text()
    sizes = "train_batch_size: [{start: 0, value: 16}, {start: 2, value: 32}]"
    (place.folder / "run.yaml").write_text(text.replace("train_batch_size: 16", sizes))
    fresh = (*FRESH[:-2], *WATCHED)
    hit, compiled = "Persistent compilation cache hit for 'jit_train_step'", "Compiling jit(train_step)"
    tried, started = place.run(*fresh, "--dry_run", "true", **CACHES_ALL), place.run(*fresh, **CACHES_ALL)
    assert (tried.code, started.code) == (0, 0), started.err
    assert (tried.err.count(compiled), tried.err.count(hit)) == (3, 0)
    assert (started.err.count(compiled), started.err.count(hit)) == (3, 3)


@pytest.mark.soak  # damaged programs are also a test of tests/session/test_compilation_cache.py
def test_a_broken_cache_is_only_a_warning(workplace):
    place = workplace()
    place.write("evals: []")
    place.finish(*FRESH, "--trainer.id", "one", **CACHES_ALL)
    entries = list((place.folder / "xla").glob("*-cache"))
    assert entries
    for entry in entries:
        entry.write_text("not a program")
    second = place.finish(*FRESH, "--trainer.id", "two", **CACHES_ALL)
    assert "cannot read jit_train_step" in second.err
    assert "The cached program was deleted and is compiled again" in second.err
    assert place.losses("two") == place.losses("one")
