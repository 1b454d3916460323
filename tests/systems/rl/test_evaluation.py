"""The evaluation `rollouts`, against generation by hand and rewards computed here."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokens import TokensConfig
from jaxlm.evals import batches
from jaxlm.evals.base import EvalConfig, EvalContext
from jaxlm.evals.batches import prompt_ids
from jaxlm.models.base import vocab_axis
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.unstacked import Generator
from jaxlm.objectives.next_token import score_batch
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.fields.proofs import outcome_of
from tests.fields.trees import tree

RECORDS = [{"prompt": "ab", "answer": 3, "other": [{"role": "user", "content": "ab"}]}, {"prompt": "cd", "answer": 5}]
FUNCTIONS = Path(__file__).with_name("functions.py")
COUNTS = {"type": "length", "name": "length", "max_tokens": 10}


def config_of(file, records=RECORDS, **fields):
    file.write_text("".join(json.dumps(one) + "\n\n" for one in records))
    fields = {"prompts_file": str(file), "rewards": [COUNTS], "max_new_tokens": 8} | fields
    return decode(EvalConfig, ConfigSource({"type": "rollouts", **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 1e-30}, r"temperature: 1e-30 given, 0 \(greedy\) or 1e-20 to 1e\+20 expected"),
        (
            {"num_samples": 2},
            r"num_samples: 2 given together with temperature: 0\.0, with which all answers are the same",
        ),
        (
            {"num_samples": 3, "batch_size": 2, "temperature": 1.0},
            "batch_size: 2 given, but num_samples is 3",
        ),
        ({"rewards": [COUNTS, COUNTS]}, "2 rewards have the name 'length'"),
        ({"rewards": [{"type": "format", "pattern": "("}]}, "not a valid regular expression"),
        ({"prompts_file": "no/such.jsonl"}, "there is no file no/such.jsonl"),
        ({"prompts_file": ""}, "prompts_file: missing"),
        ({"rewards": []}, "rewards: missing"),
    ],
)
def test_mistakes_are_refused_before_anything_is_compiled(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path / "p.jsonl", **fields).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_key": "question"}, r"p.jsonl, line 1: there is no key 'question'. Its keys: prompt, answer, other"),
        ({"prompt_key": "answer"}, r"line 1: answer: a text expected, but it is 3"),
        ({"records": []}, "has no prompt"),
        ({"records": [[1]]}, "line 1: a JSON object expected"),
        ({"stop_tokens": ["<|no|>"]}, r"stop_tokens: '<\|no\|>' given, but the tokenizer has no such token"),
        ({"rewards": [{"type": "exact_match", "column": "solution"}]}, "reads the column 'solution'.* answer, other"),
        ({"rewards": [{"type": "function", "function": "no_module:f"}]}, "importing no_module failed"),
    ],
)
def test_mistakes_are_refused_at_the_start(tmp_path, fields, message):
    tokenizer = SimpleNamespace(decode=str, vocabulary=lambda: {}, stop_ids=(0,))
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path / "p.jsonl", **fields).check_opens(lambda: tokenizer, 64, dry=False)


def test_prompts_that_are_not_utf8_are_refused_with_their_place(tmp_path):
    config = config_of(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n\n' + '{"prompt": "größe"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"p.jsonl, line 3: not UTF-8 text: .*Save the file as UTF-8"):
        config.check_opens(lambda: None, 64, dry=False)


def test_the_names_of_the_metrics_are_known(tmp_path):
    names = ["reward", "rewards/length", "completions/mean_length", "completions/clipped_ratio"]
    assert config_of(tmp_path / "p.jsonl", name="x").metrics.names == tuple(f"x/{name}" for name in names)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A tokenizer, a model with random weights, and the context."""
    folder = tmp_path_factory.mktemp("rollouts")
    (folder / "a.txt").write_text("abcd " * 200)
    data = TokensConfig(train_urls=[f"{folder}/a.txt"], cache_dir=f"{folder}/c", vocab_size=260)
    tokenizer = data.corpus.load_tokenizer(log=lambda _: None)
    plan = outcome_of(tree()).plan
    model = plan.state_builder.model.build(vocab_axis(tokenizer.vocab_size), key=jax.random.key(0))
    model = jax.tree.map(lambda x: x * 20, model)
    logged: list[Any] = []

    def chat_prompt(record, key, where):
        text = f"<{record[key][0]['content']}>"
        return text, tokenizer.encode(text)

    context = EvalContext(
        *(plan.layout, plan.precision, tokenizer, tokenizer.token_bytes(), (), print, 32, score_batch),
        log_completions=lambda name, rows, scores: logged.append((name, rows, scores)),
        chat_prompt=chat_prompt,
    )
    return tokenizer, model, context, logged


@pytest.mark.slow
def test_prompts_that_are_too_long_are_refused_before_training(case, tmp_path):
    message = (
        r"the prompt of .*p.jsonl, line 1 has \d tokens .* model.seq_len: 32. .* max_new_tokens to at most (29|30)"
    )
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path / "p.jsonl", max_new_tokens=31).open(case[2])


def by_hand(case, prompts, *options):
    tokenizer, model, *_ = case
    config = GenerationConfig(8, *options, stop_ids=tuple(tokenizer.stop_ids))
    return generate_tokens(Generator.of(model), [prompt_ids(tokenizer, prompt) for prompt in prompts], config)


def run(case, folder, **fields):
    """The metrics, and the rows and scores that are logged."""
    _, model, context, logged = case
    logged.clear()
    config = config_of(folder / "p.jsonl", **fields)
    metrics = config.open(context).run(model)
    ((name, rows, scores),) = logged
    assert name == config.metrics.title
    return metrics, rows, scores


SAMPLED = {"num_samples": 3, "temperature": 3.0, "seed": 7}


@pytest.mark.slow
def test_metrics_are_means_over_the_answers(case, tmp_path, capsys):
    tokenizer = case[0]
    greedy = by_hand(case, ["ab", "cd"], 0.0)
    metrics, rows, scores = run(case, tmp_path)
    finished = [len(ids) < 8 for ids in greedy]
    assert list(rows.completions) == [tokenizer.decode(ids) for ids in greedy]
    assert (list(rows.is_finished), list(rows.prompts)) == (finished, ["ab", "cd"])
    assert rows.columns["answer"] == [3, 5]
    assert [place.rpartition(", ")[2] for place in rows.places] == ["line 1", "line 3"]
    lengths = [len(ids) + end for ids, end in zip(greedy, finished, strict=True)]
    expected = {
        "rollouts/reward": -np.mean(lengths) / 10,
        "rollouts/rewards/length": -np.mean(lengths) / 10,
        "rollouts/completions/mean_length": np.mean(lengths),
        "rollouts/completions/clipped_ratio": 1 - np.mean(finished),
    }
    assert metrics == pytest.approx(expected, rel=1e-12)
    np.testing.assert_array_equal(scores["reward"], [-n / 10 for n in lengths])

    by_number = {number: token for token, number in tokenizer.vocabulary().items()}
    first, other = greedy[0][0], next(n for n in sorted(by_number) if n not in {*greedy[0], *tokenizer.stop_ids})
    without_answers = [{"prompt": "ab", "answer": None}, {"prompt": "cd", "answer": None}]
    rewards = [COUNTS, {"type": "exact_match"}]
    stops = [by_number[other], by_number[first]]
    metrics, rows, _ = run(case, tmp_path, records=without_answers, rewards=rewards, stop_tokens=stops)
    assert (rows.completions[0], rows.completion_ids[0]) == ("", [first]), (
        "the token that ended it, not the first of them"
    )
    assert "rollouts/rewards/exact_match" not in metrics
    said = (
        "warning: evaluation 'rollouts': the reward 'exact_match' applies to none of the 2 answers, so it has no metric"
    )
    assert capsys.readouterr().out.count(said) == 1

    # All answers to a prompt are in one batch, here one batch for each prompt.
    sampled = [ids for prompt in ("ab", "cd") for ids in by_hand(case, [prompt] * 3, 3.0, None, None, 7)]
    texts = [tokenizer.decode(ids) for ids in sampled]
    assert len(set(texts)) > 3
    assert list(run(case, tmp_path, **SAMPLED, batch_size=4)[1].completions) == texts


@pytest.mark.slow
def test_the_cache_has_the_dtype(case, tmp_path, monkeypatch):
    configs = []
    generate = batches.generate_tokens
    monkeypatch.setattr(batches, "generate_tokens", lambda *given: configs.append(given[2]) or generate(*given))
    run(case, tmp_path)
    run(case, tmp_path, cache_dtype="bfloat16")
    assert [config.cache_dtype for config in configs] == [None, "bfloat16"]


@pytest.mark.soak
def test_the_other_keys(case, tmp_path):
    tokenizer = case[0]
    greedy = by_hand(case, ["ab", "cd"], 0.0)
    texts = list(run(case, tmp_path, **SAMPLED)[1].completions)
    assert list(run(case, tmp_path, **SAMPLED, batch_size=4)[1].completions) == texts
    assert list(run(case, tmp_path, **SAMPLED | {"seed": 8})[1].completions) != texts
    assert list(run(case, tmp_path, **SAMPLED | {"num_samples": 1})[1].completions) == [texts[0], texts[3]]
    top = run(case, tmp_path, **SAMPLED, top_k=1)[1].completions
    assert list(run(case, tmp_path, **SAMPLED, top_p=1e-6)[1].completions) == list(top)
    assert top[0] == tokenizer.decode(greedy[0])

    metrics, rows, _ = run(case, tmp_path, max_prompts=1, name="one", max_new_tokens=3)
    assert (len(rows), set(metrics)) == (1, {name.replace("rollouts", "one") for name in run(case, tmp_path)[0]})
    assert all(len(ids) <= 3 for ids in rows.completion_ids)
    records = [{"other": [{"role": "user", "content": "ab"}], "answer": 1}]
    metrics, rows, _ = run(case, tmp_path, records=records, messages_key="other")
    assert (list(rows.prompts), set(rows.columns)) == (["<ab>"], {"answer"})
    (first,) = (name for name, number in tokenizer.vocabulary().items() if number == greedy[0][0])
    metrics, rows, _ = run(case, tmp_path, stop_tokens=[first], max_prompts=1)
    assert (list(rows.completions), metrics["rollouts/completions/clipped_ratio"]) == ([""], 0)
    sleeps = {"type": "function", "function": f"{FUNCTIONS}:sleeps"}
    with pytest.raises(ConfigError, match=r"no result for the 2 completions of .* within 0\.2 s"):
        run(case, tmp_path, reward_timeout_s=0.2, rewards=[sleeps])
