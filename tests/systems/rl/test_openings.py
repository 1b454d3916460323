"""What a start of a run on rollouts opens: told by a dry run, before anything is tokenized or compiled."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jaxlm import train
from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.observe.console import Console
from jaxlm.plan.plan import make_plan, plan_phases
from jaxlm.plan.run_config import RunConfig
from jaxlm.session import dry_run as dry_runs
from tests.answers import write_tokenizer
from tests.ports import reserved_port
from tests.session.test_dry_run import configured
from tests.systems.rl.own import OpensNothingConfig

NUMBER = {"type": "format", "pattern": "[0-9]+"}
OBJECTIVE = {"type": "grpo", "old_policy": "rollout", "kl": None}
GONE = {"type": "function", "function": "no_such_module:score"}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run on rollouts with these keys of `data` and these evaluations."""
    write_tokenizer(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "answer": 1}) + "\n")

    def configure(evals=(), tokenizer=str(tmp_path), phases=(), **data: Any) -> RunConfig:
        data = {"type": "rollouts", "train_urls": ["prompts.jsonl"], "max_new_tokens": 8, "rewards": [NUMBER], **data}
        rollouts = {"type": "rollouts", "prompts_file": "prompts.jsonl", "rewards": [NUMBER]}
        evals = [one if "type" in one else rollouts | one for one in evals]
        return configured(data={**data, "tokenizer": tokenizer}, evals=evals, objective=OBJECTIVE, phases=list(phases))

    return configure


def openings(config: RunConfig) -> dict[str, str]:
    plan: Any = SimpleNamespace(data=(config.data,), config=config, phases=plan_phases(config)[0])
    return dict(dry_runs._answers_in_turn(list(dry_runs._openings(plan))))


def server(**keys: Any) -> dict[str, Any]:
    return {"type": "server", "server": {"url": f"http://127.0.0.1:{reserved_port()}"}, "weights_folder": "w", **keys}


@pytest.mark.slow
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
    served = {"type": "model", "server": server()["server"]}
    refusals = openings(config([{"rewards": [served]}], rewards=[served]))
    assert set(refusals) == {"data rollouts", "evaluation rollouts"}
    for answer in refusals.values():
        assert re.search("/v1/models gave no answer: .*refused.* 1 attempts", answer), answer
    assert openings(config(tokenizer="bpe"))["data rollouts"].startswith("not checked: whether it opens")
    (answer,) = openings(config([{"type": "samples", "prompts": ["a"], "max_new_tokens": 10**6}])).values()
    assert "a start would end with: evals: type samples: a prompt has 1 token and" in answer
    assert not {"cache", "w"} & {path.name for path in tmp_path.iterdir()}, "it writes nothing"


@pytest.mark.slow
def test_columns_are_looked_for_in_the_records(config, tmp_path):
    """In all of them, if the first ones have not all columns. The curriculum needs a number in each."""
    records = [{"prompt": "a", "answer": 1, "level": 2}] * 3 + [{"prompt": "a", "late": 1, "level": None}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    match = {"type": "exact_match", "column": "answer"}
    levels = {"type": "difficulty", "column": "level", "full_after": 4}
    assert openings(config(rewards=[match, match | {"name": "other", "column": "late"}])) == {}
    (answer,) = openings(config(rewards=[match, match | {"name": "other", "column": "anser"}])).values()
    assert (
        "would end with: reward 'other' reads the column 'anser', which the records do not have. Their colum" in answer
    )
    (answer,) = openings(config(rewards=[match], curriculum=levels)).values()
    assert "data.curriculum.column: level given, a finite number in every record expected, but" in answer
    assert "prompts.jsonl: line 4 has None there" in answer
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:3]))
    assert openings(config(rewards=[match], curriculum=levels)) == {}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    left_out = {"curriculum": levels, "long_prompts": "leave_out"}  # perhaps the prompt that has no number
    assert openings(config(rewards=[match], **left_out)) == {}
    nowhere = ["no.jsonl"]  # another row says so
    assert openings(config(rewards=[match | {"column": "anser"}], curriculum=levels, train_urls=nowhere)) == {}


@pytest.mark.slow
def test_a_column_of_another_source_does_not_cause_a_full_read(config, tmp_path):
    """Line 1,100 of the first source says whether it was read."""
    lines = [json.dumps({"prompt": "a", "early": 1})] * 1099 + ["no JSON"]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    (tmp_path / "short.jsonl").write_text(json.dumps({"prompt": "a", "late": 1}))
    files = {name: {"train_urls": [f"{name}.jsonl"], "format": {"type": "prompts"}} for name in ("long", "short")}
    both = {"train_urls": [], "configs": files, "train_weights": {"long": 1, "short": 1}}
    late, absent = ({"type": "exact_match", "column": name} for name in ("late", "absent"))
    assert openings(config(rewards=[late], **both)) == {}
    (answer,) = openings(config(rewards=[absent], **both)).values()
    assert re.search(r"long\.jsonl: line 1100", answer), answer


@pytest.mark.slow
def test_a_dry_run_lists_it_before_it_compiles(config, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(dry_runs, "compile_steps", mock.Mock(side_effect=KeyError("compiles")))
    with pytest.raises(KeyError, match="compiles"):
        dry_runs.dry_run(make_plan(config(rewards=[GONE]), "x", 64), Console(shown))
    assert "data rollouts" in shown.getvalue()
    assert "importing no_such_module failed" in shown.getvalue()


@pytest.mark.slow
def test_a_start_ends_before_it_tokenizes_or_compiles(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "enable_compilation_cache", lambda folder: None)  # it is the tests' own
    plan = make_plan(config(), "x", 64)
    for wrong in (config(rewards=[GONE]), config([{"rewards": [GONE]}])):
        started = train._prepared(replace(plan, config=wrong, data=(wrong.data,)), Console(io.StringIO()))
        with pytest.raises(ConfigError, match="importing no_such_module failed"), started:
            pass
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cursor", "missing"),
    [
        (None, "one"),
        (Cursor(3, 0, "one", False, False), "one"),
        (Cursor(4, 0, "one", False, False), None),
        (Cursor(2, 0, "one", False, False, History(phase_ends=(2,))), None),
        (Cursor(5, 1, "two", False, False), None),
        (Cursor(4, 0, "one", False, False), "two"),
        (Cursor(4, 0, "one", False, False), "evaluation"),
        (Cursor(7, 1, "two", False, False), "two"),
        (Cursor(8, 1, "two", False, False), None),
    ],
)
def test_what_only_finished_phases_needed_may_be_gone(config, tmp_path, monkeypatch, cursor, missing):
    monkeypatch.setattr(train, "enable_compilation_cache", lambda folder: None)
    monkeypatch.setattr(train, "expected_cursor", lambda plan: cursor)
    monkeypatch.setattr(train, "tokenize_on_ray", mock.Mock(side_effect=KeyError("tokenizes")))
    is_done = cursor is not None and cursor.step == 8
    gone = {"one": missing in ("one", None), "two": missing == "two" or is_done}
    rewards = {name: [GONE if is_gone else NUMBER] for name, is_gone in gone.items()}
    phases = [{"name": name, "num_train_steps": 4, "data": {"rewards": rewards[name]}} for name in rewards]
    evals = [{"rewards": [GONE if missing == "evaluation" or is_done else NUMBER]}]
    started = train._prepared(make_plan(config(evals, phases=phases), "x", 64), Console(io.StringIO()))
    error, message = (KeyError, "tokenizes") if missing is None else (ConfigError, "importing no_such_module failed")
    with pytest.raises(error, match=message), started:
        pass


def test_evaluations_of_the_same_name_are_refused(config):
    with pytest.raises(ConfigError, match="2 evaluations given with the name 'rollouts', under which their metrics"):
        make_plan(config([{}, {"name": "few"}, {"max_prompts": 1}]), "x", 64)
