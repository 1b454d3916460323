"""What a start opens besides text: told by a dry run, before anything is tokenized or compiled, and closed if it fails."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jaxlm import train
from jaxlm.config.run import RunConfig
from jaxlm.core.errors import ConfigError
from jaxlm.observe.console import Console
from jaxlm.run import dry_run as dry_runs
from jaxlm.run.plan import make_plan
from tests.answers import write_tokenizer
from tests.environments.own import OpensNothingConfig
from tests.ports import reserved_port
from tests.run.test_dry_run import configured

GONE = {"type": "function", "function": "no_such_module:score"}
NUMBER = {"type": "format", "pattern": "[0-9]+"}
OBJECTIVE = {"type": "grpo", "old_policy": "rollout", "kl_coef": 0}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run on rollouts with these keys of `data` and these evaluations."""
    write_tokenizer(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "answer": 1}) + "\n")

    def configure(evals=(), tokenizer=str(tmp_path), **data: Any) -> RunConfig:
        data = {"type": "rollouts", "train_urls": ["prompts.jsonl"], "max_new_tokens": 8, "rewards": [NUMBER], **data}
        evals = [{"type": "rollouts", "prompts_file": "prompts.jsonl", "rewards": [NUMBER], **one} for one in evals]
        return configured(data={**data, "tokenizer": tokenizer}, evals=evals, objective=OBJECTIVE)

    return configure


def openings(config: RunConfig) -> dict[str, str]:
    plan: Any = SimpleNamespace(data=(config.data,), config=config)
    return dict(dry_runs._answers_in_turn(list(dry_runs._openings(plan))))


def server(**keys: Any) -> dict[str, Any]:
    return {"type": "server", "server": {"url": f"http://127.0.0.1:{reserved_port()}"}, "weights_folder": "w", **keys}


def test_a_dry_run_says_what_does_not_open(config, tmp_path):
    assert openings(config()) == {}
    refusals = [
        ({"environment": {"type": "tool"}}, r"the environment needs the special token <\|python_end\|>, which"),
        (
            {"environment": {"type": f"{OpensNothingConfig.__module__}:OpensNothingConfig"}},
            "the environment OpensNothingConfig opened None, an Environment expected",
        ),
        ({"sampler": server()}, "data.sampler.server: the server at http://127.0.0.1:.* gave no answer: .*refused"),
        ({"sampler": server(), "temperature": 0.5}, r"data.sampler.logprobs: raw given with temperature: 0\.5"),
    ]
    for keys, message in refusals:
        ((name, answer),) = openings(config(**keys)).items()
        assert name == "data rollouts"
        assert re.match(f"a start would end with: {message}", answer), answer
    refusals = openings(config([{"rewards": [GONE]}], rewards=[GONE]))
    assert set(refusals) == {"data rollouts", "evaluation rollouts"}
    for answer in refusals.values():
        assert "a start would end with: reward 'score' (type: function): 'no_such_module:score': importing" in answer
    assert openings(config(tokenizer="bpe"))["data rollouts"].startswith("not checked: whether its rewards open")
    assert not {"cache", "w"} & {path.name for path in tmp_path.iterdir()}, "it writes nothing"


@pytest.mark.slow
def test_a_dry_run_lists_it_before_it_compiles(config, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(dry_runs, "compile_steps", mock.Mock(side_effect=KeyError("compiles")))
    with pytest.raises(KeyError, match="compiles"):
        dry_runs.dry_run(make_plan(config(rewards=[GONE]), "x", 64), Console(shown))
    assert "data rollouts" in shown.getvalue()
    assert "importing no_such_module failed" in shown.getvalue()


def test_a_start_ends_before_it_tokenizes_or_compiles(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "enable_compilation_cache", lambda folder: None)  # it is the tests' own
    plan = make_plan(config(), "x", 64)
    for wrong in (config(rewards=[GONE]), config([{"rewards": [GONE]}])):
        started = train._prepared(replace(plan, config=wrong, data=(wrong.data,)), Console(io.StringIO()))
        with pytest.raises(ConfigError, match="importing no_such_module failed"), started:
            pass
    assert not (tmp_path / "cache").exists()


def test_evaluations_of_the_same_name_are_refused(config):
    with pytest.raises(ConfigError, match="2 evaluations given with the name 'rollouts', under which their metrics"):
        make_plan(config([{}, {"name": "few"}, {"max_prompts": 1}]), "x", 64)


def test_batches_are_closed_if_the_step_does_not_compile(monkeypatch):
    closed: list[str] = []
    run = mock.MagicMock()
    run.open_data.return_value.batches.return_value = SimpleNamespace(close=lambda: closed.append("batches"))
    monkeypatch.setattr(train, "with_annotations", lambda plan, phase, data, log: data)
    monkeypatch.setattr(train, "enter_phase", lambda *arguments: None)
    monkeypatch.setattr(train, "compile_steps", mock.Mock(side_effect=ConfigError("too large")))
    conductor = mock.MagicMock(resumed=None)
    opening = train._open_phase(run, mock.MagicMock(), None, conductor, mock.MagicMock())
    with pytest.raises(ConfigError, match="too large"), opening:
        pass
    assert closed == ["batches"]
