"""Completions with their rewards: in their file, on the console, in trackers, and on the page of `jaxlm report`."""

import io
import json
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.logged import ScoredRows
from jaxlm.evals.base import Eval
from jaxlm.observe.completions import CompletionLog, CompletionsConfig
from jaxlm.observe.console import Console
from jaxlm.observe.hooks import EvalHook, Generated, ScheduledEval
from jaxlm.observe.logged_run import read_runs
from jaxlm.observe.page.page import render
from jaxlm.observe.records import COMPLETIONS, EARLIER_COMPLETIONS
from jaxlm.observe.trackers import JsonlTracker
from jaxlm.observe.trackers.wandb import WandbTracker
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource

SCORES = {
    "right": np.array([1.0, 0.0, np.nan]),
    "length": np.array([-0.5, -1.0, 0.0]),
    "reward": np.array([0.5, -1.0, 0.0]),
}
ADVANTAGES = np.array([1.25, -1.25, 0.0])


def some_rows(text="four"):
    prompts, texts = ["2+2? ", "2+2? ", "é? "], [text, "five", "<b>"]
    return ScoredRows(prompts, texts, [[1], [2, 3], []], [True, False, True], {}, ["a:1", "a:1", "a:2"])


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_completion_is_a_line_and_some_are_shown(tmp_path):
    shown, other = io.StringIO(), mock.MagicMock()
    files = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=0)
    config = decode(CompletionsConfig, ConfigSource({"show_every": 2, "num_shown": 1}))
    log = CompletionLog(config, (files, other), Console(shown))
    log.log(4, some_rows("x" * 500), SCORES, ADVANTAGES)
    log.log(5, some_rows(), SCORES, ADVANTAGES)
    records = lines_of(tmp_path / COMPLETIONS)  # flushed, although nothing is closed
    assert len(records) == 6
    assert records[3] == {
        "step": 5,
        "name": "train",
        "place": "a:1",
        "prompt": "2+2? ",
        "completion": "four",
        "rewards": {"right": 1.0, "length": -0.5},
        "reward": 0.5,
        "advantage": 1.25,
        "finished": True,
    }
    assert (records[4]["finished"], records[5]["rewards"]["right"], records[5]["prompt"]) == (False, None, "é? ")
    assert other.log_completions.call_count == 1
    step, tabled = other.log_completions.call_args.args
    assert (step, [one.completion for one in tabled]) == (4, ["x" * 500])
    text = shown.getvalue()
    assert text.startswith(
        "step 4: completions (train)\n  reward 0.500  right 1.000  length -0.500  advantage +1.250\n  | 2+2? >>>…"
    )
    assert "five" not in text
    assert max(map(len, text.splitlines())) < 500
    log.log(11, some_rows(), SCORES, ADVANTAGES)
    assert other.log_completions.call_count == 2, "there may be no rollout at a multiple of show_every"
    files.close()


@pytest.mark.parametrize(
    ("keys", "num_lines", "is_shown"),
    [({}, 3, True), ({"max_per_step": 2}, 2, True), ({"show_every": 0}, 3, False), ({"num_shown": 0}, 3, False)],
)
def test_what_is_kept_and_shown(tmp_path, keys, num_lines, is_shown):
    shown = io.StringIO()
    files = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=0)
    CompletionLog(CompletionsConfig(**keys), (files,), Console(shown)).log(10, some_rows(), SCORES)
    assert len(lines_of(tmp_path / COMPLETIONS)) == num_lines
    assert bool(shown.getvalue()) == is_shown
    files.close()


def test_a_process_without_trackers_logs_nothing():
    CompletionLog(CompletionsConfig(), (), mock.MagicMock(log=pytest.fail)).log(10, some_rows(), SCORES)


@pytest.mark.parametrize("keys", [{"max_per_step": 0}, {"max_megabytes": 0}, {"show_every": -1}, {"num_shown": -1}])
def test_numbers_have_a_range(keys):
    with pytest.raises(ConfigError, match=f"{next(iter(keys))}: "):
        decode(CompletionsConfig, ConfigSource(keys))


def test_the_file_is_replaced_when_it_is_full(tmp_path):
    limit = CompletionsConfig(max_megabytes=0.0015).max_bytes
    assert limit == 1500
    for steps in (range(1, 5), range(5, 9)):  # the second process goes on with the file
        files = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=steps[0] - 1, max_completions_bytes=limit)
        for step in steps:
            CompletionLog(CompletionsConfig(show_every=0), (files,), mock.MagicMock()).log(step, some_rows(), SCORES)
        files.close()
    sizes = [(tmp_path / name).stat().st_size for name in (EARLIER_COMPLETIONS, COMPLETIONS)]
    assert all(0 < size <= limit for size in sizes)
    kept = [
        (one["step"], one["completion"])
        for name in (EARLIER_COMPLETIONS, COMPLETIONS)
        for one in lines_of(tmp_path / name)
    ]
    all_of_them = [(step, text) for step in range(1, 9) for text in some_rows().completions]
    assert kept == all_of_them[-len(kept) :]


def test_a_resumed_run_has_each_completion_once(tmp_path):
    for resume_step, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        files = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=resume_step)
        for step in steps:
            CompletionLog(CompletionsConfig(max_per_step=1), (files,), mock.MagicMock()).log(step, some_rows(), SCORES)
        files.close()
    assert [one["step"] for one in lines_of(tmp_path / COMPLETIONS)] == [1, 2, 3, 4]
    files = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=4)
    files.begin_attempt(1, 2, 2)
    CompletionLog(CompletionsConfig(max_per_step=1), (files,), mock.MagicMock()).log(3, some_rows(), SCORES)
    files.close()
    assert lines_of(tmp_path / COMPLETIONS)[-1]["attempt"] == 1


def test_completions_of_evaluations_have_their_name_and_that_of_the_weights(tmp_path):
    generated = Generated()

    class Answers(Eval):
        def run(self, model):
            generated.add_completions("held-out", some_rows(f"of {model}"), SCORES)
            return {"reward": 0.5}

    shown = io.StringIO()
    files = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=0)
    log = CompletionLog(CompletionsConfig(max_per_step=1), (files,), Console(shown))
    phase = SimpleNamespace(end=3, averaged=lambda state: {"ema": "average"})
    hook = EvalHook([ScheduledEval(Answers())], 3, phase, [files], Console(io.StringIO()), generated, completions=log)
    hook.run(3, SimpleNamespace(model="weights"))
    files.close()
    found = [(one["step"], one["name"], one["completion"]) for one in lines_of(tmp_path / COMPLETIONS)]
    assert found == [(3, "eval/held-out", "of weights"), (3, "eval/ema/held-out", "of average")]
    assert re.findall(r"step 3: completions \((.*)\)", shown.getvalue()) == ["eval/held-out", "eval/ema/held-out"]
    assert hook.latest == {"eval/reward": 0.5, "eval/ema/reward": 0.5}


def test_wandb_gets_a_table():
    wandb = pytest.importorskip("wandb")
    handle = mock.MagicMock(step=0)
    trackers = (mock.MagicMock(), WandbTracker(handle, None))
    CompletionLog(CompletionsConfig(show_every=1, num_shown=3), trackers, mock.MagicMock()).log(
        5, some_rows(), SCORES, ADVANTAGES
    )
    (call,) = handle.log.call_args_list
    table = call.args[0]["train/completions"]
    assert (call.kwargs, isinstance(table, wandb.Table)) == ({"step": 5}, True)
    assert table.columns == ["step", "prompt", "completion", "reward", "right", "length", "advantage", "finished"]
    assert table.data[0] == [5, "2+2? ", "four", 0.5, 1.0, -0.5, 1.25, True]
    assert table.data[2] == [5, "é? ", "<b>", 0.0, None, 0.0, 0.0, True]


def test_the_page_shows_completions(tmp_path):
    files = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=0)
    log = CompletionLog(CompletionsConfig(show_every=0), (files,), mock.MagicMock())
    for step in range(1, 31):
        files.log(step, {"train/loss": 1.0})
        log.log(step, some_rows(f"text {step}"), SCORES, ADVANTAGES)
    files.close()
    with (tmp_path / COMPLETIONS).open("a") as file:
        file.write(
            '{"step": 31, "name": "train", "prompt": "x", "completion": "y", "rewards": {"a": "b"}, "reward": 1}\n'
        )
    page = render(read_runs([str(tmp_path)]))
    assert "<h2>Completions</h2>" in page
    assert "<th>reward</th><th>right</th><th>length</th><th>advantage</th>" in page
    shown = [int(step) for step in re.findall(r"</b>text (\d+)</pre>", page)]
    assert (shown[0], shown[-1], len(shown)) == (30, 1, 12)
    assert "</b>&lt;b&gt;</pre>" in page  # texts of a model are not to be trusted
    assert "54 others are in completions.jsonl." in page
    assert "1 of 91 lines of completions.jsonl could not be read" in page
