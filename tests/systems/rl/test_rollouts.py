"""Data of type rollouts: prompts and their records, batches of a rollout, what is restored, dynamic sampling, refusals."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.completions import PromptsFormat
from jaxlm.data.loader import RunServices
from jaxlm.models.inference.sampling import Sampling
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.rl import rollouts as config_of_rollouts
from jaxlm.systems.rl.environments import Environment, EnvironmentConfig, Observation, ToolEnvironmentConfig
from jaxlm.systems.rl.rewards.base import Rewards
from jaxlm.systems.rl.rewards.function import FunctionRewardConfig
from jaxlm.systems.rl.rollouts import RolloutsConfig
from jaxlm.systems.rl.samplers import LocalSamplerConfig, Sample, Sampler, SamplerConfig
from tests.data.helpers import some_text, write_records
from tests.data.test_loader import layout_of
from tests.data.test_pairs import CHATML
from tests.fields.proofs import assert_test_exists

RECORDS = [{"prompt": f"Q{n}: {some_text(n, 2)}", "worth": n % 4, "n": n} for n in range(40)]
GROUP = 3


class Scored:
    """Rewards: the worth of the record times the number of the response, so all are equal for a record that is worth 0."""

    max_new_tokens = 8

    def __init__(self, configs, context, *, timeout_s):
        self.names = [config.name for config in configs]
        assert (context.max_new_tokens, timeout_s) == (self.max_new_tokens, 7.5)
        self.seen = []

    def check_columns(self, existing):
        assert list(existing) == ["n", "worth"]

    def score(self, rows):
        self.seen.append(rows)
        worth = np.array([value * (number % GROUP) for number, value in enumerate(rows.columns["worth"])], np.float64)
        return {**dict.fromkeys(self.names, worth), "reward": worth}

    def close(self):
        return


class Scripted(Sampler):
    """Answers row r with r % 4 + 1 tokens, of which every third is not the policy's."""

    def __init__(self):
        self.requests: list[Any] = []

    def sample(self, model, prompts, request):
        self.requests.append((model, [tuple(prompt) for prompt in prompts], request))
        return [
            Sample(
                tuple(10 + row + i for i in range(row % 4 + 1)),
                tuple(-0.25 * (i + 1) for i in range(row % 4 + 1)),
                tuple(int(i % 3 < 2) for i in range(row % 4 + 1)),
                row % 4 < 3,
            )
            for row in request.rows
        ]

    def close(self):
        return


SAMPLER = Scripted()


@dataclass(frozen=True)
class ScriptedConfig(SamplerConfig):
    def check(self):
        return

    def open(self, context):
        return SAMPLER


@pytest.fixture
def seen(monkeypatch):
    """The rows that were scored, one entry per round."""
    found: list[Any] = []

    def scored(*arguments, **options):
        rewards = Scored(*arguments, **options)
        rewards.seen = found
        return rewards

    monkeypatch.setattr(config_of_rollouts, "Rewards", scored)
    return found


@pytest.fixture
def opened(tokenizer, tmp_path, seen):
    """Opens rollouts of these records. Returns the data and the batches of a phase."""
    tokenizer.save(tmp_path / "tokenizer")
    SAMPLER.requests.clear()

    def open_records(
        records=RECORDS, seq_len=48, sizes=((0, 4),), step=0, log=lambda _: None, log_rollout=lambda *_: None, **keys
    ):
        number = len(list(tmp_path.glob("*.jsonl")))
        path = tmp_path / f"{number}.jsonl"
        write_records(path, records)
        config = RolloutsConfig(
            **{
                "train_urls": [str(path)],
                "cache_dir": f"{tmp_path}/cache{number}",
                "tokenizer": f"{tmp_path}/tokenizer",
                "group_size": GROUP,
                "max_new_tokens": 8,
                "reward_timeout_s": 7.5,
                "rewards": [FunctionRewardConfig(function="my_rewards:score", name="worth")],
                "sampler": ScriptedConfig(),
            }
            | keys
        )
        check_fields(config, "data")
        config.check()
        data = config.open(config.corpus.load_tokenizer(lambda _: None), seq_len, log)
        schedule = BatchSchedule.of([BatchSize(*size) for size in sizes])
        services = RunServices(log=log, log_rollout=log_rollout)
        return data, data.batches(schedule, layout_of(data=2), start=0, first_step=step, seed=3, services=services)

    return open_records


def columns_of(batch):
    arrays = {
        name: getattr(batch.responses, name) for name in ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    }
    arrays |= {name: getattr(batch, name) for name in ("rewards", "sampler_logps", "finished", "reward_parts")}
    return {name: np.asarray(array.array)[0] for name, array in arrays.items()}


def test_every_field_of_the_section_has_a_test():
    inherited = {field.name for field in dataclasses.fields(DataConfig)}
    assert {field.name for field in dataclasses.fields(RolloutsConfig)} - inherited == set(FIELDS)
    assert [field.name for field in dataclasses.fields(LocalSamplerConfig)] == [
        "max_rows"
    ]  # tests/systems/rl/test_responses.py
    for test in FIELDS.values():
        assert_test_exists(test if "::" in test else f"tests/systems/rl/test_rollouts.py::{test}")


COLUMNS = "test_a_batch_has_each_response_after_its_prompt_with_its_reward"
MINIBATCHES = "test_a_rollout_is_trained_on_in_minibatches_and_restored_in_the_middle"
FIELDS = {
    **dict.fromkeys(("group_size", "max_new_tokens", "temperature", "rewards", "reward_timeout_s", "sampler"), COLUMNS),
    **dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty"), COLUMNS),
    **dict.fromkeys(("updates_per_rollout", "minibatches_per_rollout"), MINIBATCHES),
    "dynamic_sampling": "test_groups_with_equal_rewards_are_replaced_as_long_as_rounds_are_left",
    "curriculum": "tests/systems/rl/test_curricula.py::test_a_resumed_curriculum_goes_on_as_if_nothing_had_happened",
    **dict.fromkeys(("environment", "max_turns"), "test_an_environment_speaks_between_turns_and_rewards_them"),
    "long_prompts": "test_prompts_that_are_too_long_are_refused_with_their_place_or_left_out",
}


def test_a_batch_has_each_response_after_its_prompt_with_its_reward(opened, seen, tokenizer):
    filters = {"top_k": 50, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    _, batches = opened(temperature=0.5, **filters)
    assert batches.due(0)
    batches.refresh("the weights", 0)
    assert not batches.due(0)
    assert batches.due(1)
    ((model, prompts, request),) = SAMPLER.requests
    assert (model, request.step, request.seed, list(request.rows)) == ("the weights", 0, 3, list(range(12)))
    assert (request.max_new_tokens, request.stop_ids) == (8, tokenizer.stop_ids)
    assert request.sampling == Sampling(0.5, **filters)
    batch = next(batches)
    assert (batch.temperature, batch.samples_all) == (0.5, False)
    assert [axis.name for axis in batch.responses.tokens.axes] == ["microbatch", "batch", "group", "position"]
    columns, (rows,) = columns_of(batch), seen
    for row in range(12):
        at, record = divmod(row, GROUP)[0], RECORDS[rows.columns["n"][row]]
        assert list(prompts[row]) == [tokenizer.bos_id, *tokenizer.encode(record["prompt"])]
        answer = [10 + row + i for i in range(row % 4 + 1)]
        whole, before = [*prompts[row], *answer], len(prompts[row]) - 1
        found = {name: column[at, row % GROUP] for name, column in columns.items()}
        size = len(whole) - 1
        assert found["tokens"][: size + 1].tolist() == whole
        assert found["targets"][:size].tolist() == whole[1:]
        mask = [int(i % 3 < 2) for i in range(len(answer))]
        assert found["loss_mask"][:size].tolist() == [0] * before + mask
        assert not found["loss_mask"][size:].any()
        expected = [-0.25 * (i + 1) * m for i, m in enumerate(mask)]
        assert found["sampler_logps"][before:size].tolist() == expected
        assert found["segment_ids"].tolist() == [1] * len(whole) + [0] * (48 - len(whole))
        assert found["rewards"] == record["worth"] * (row % GROUP)
        assert (found["reward_parts"].tolist(), found["finished"]) == ([found["rewards"]], row % 4 < 3)
        written = [token for i, token in enumerate(answer) if i % 3 < 2]
        turns = [answer[:2], answer[3:]] if len(answer) == 4 else [answer[:2]]
        assert rows.completions[row] == "\n".join(map(tokenizer.decode, turns))
        assert (list(rows.completion_ids[row]), rows.is_finished[row]) == (written, row % 4 < 3)
        assert rows.prompts[row] == tokenizer.decode(prompts[row])
        assert rows.places[row].endswith(f"line {record['n'] + 1}")
    assert set(rows.columns) == {"worth", "n"}
    metrics = batches.metrics()
    assert metrics["train/rewards/worth"] == pytest.approx(columns["rewards"].mean())
    assert metrics["train/completions/clipped_ratio"] == 0.25
    assert (metrics["train/completions/min_length"], metrics["train/completions/max_length"]) == (1, 3)
    assert metrics["train/completions/mean_terminated_length"] == pytest.approx(5 / 3)


@dataclass(frozen=True)
class AnswersConfig(EnvironmentConfig):
    """Answers each turn with its number. Ends the conversations of records whose `n` is even after their second turn."""

    is_silent: bool = False

    def open(self):
        return Answers(self.is_silent)


class Answers(Environment):
    def __init__(self, is_silent: bool):
        self.is_silent = is_silent

    def reset(self, prompt, columns):
        self.prompt, self.n, self.turns = prompt, columns["n"], 0

    def step(self, completion):
        self.turns += 1
        return Observation(
            None if self.is_silent else str(self.turns), 0.25 * self.turns, self.turns == 2 and self.n % 2 == 0
        )


@pytest.mark.parametrize(("max_turns", "is_silent"), [(2, False), (3, False), (3, True)])
def test_an_environment_speaks_between_turns_and_rewards_them(opened, seen, tokenizer, max_turns, is_silent):
    logged: list[Any] = []
    keys = {
        "environment": AnswersConfig(is_silent),
        "max_turns": max_turns,
        "max_new_tokens": 20,
        "reward_timeout_s": 7.5,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scored, "max_new_tokens", 20)
        _, batches = opened(seq_len=64, log_rollout=lambda *of_rollout: logged.append(of_rollout), **keys)
        batches.refresh("the weights", 0)
    assert [request.turn for _, _, request in SAMPLER.requests] == list(range(max_turns))
    assert {(request.num_rows, request.max_new_tokens) for _, _, request in SAMPLER.requests} == {(12, 20)}
    assert SAMPLER.requests[0][2].room == 20 > SAMPLER.requests[1][2].room
    columns, (rows,) = columns_of(next(batches)), seen
    ((step, logged_rows, scores, advantages),) = logged
    assert step == 1
    for row in range(12):
        at, number, n = row // GROUP, row % GROUP, rows.columns["n"][row]
        turn = [10 + row + i for i in range(row % 4 + 1)]
        # Row 3 of four never finishes its turn, so the environment never answers it.
        num_turns = 1 if row % 4 == 3 else 2 if n % 2 == 0 else max_turns
        answers = [[] if is_silent else tokenizer.encode(str(turn_number)) for turn_number in (1, 2, 3)]
        tokens, mask = list(turn), [1] * len(turn)
        for turn_number in range(1, num_turns):
            tokens += [*answers[turn_number - 1], *turn]
            mask += [0] * len(answers[turn_number - 1]) + [1] * len(turn)
        written = [token for token, is_own in zip(tokens, mask, strict=True) if is_own]
        assert list(rows.completion_ids[row]) == written, "rewards do not read what the environment has said"
        assert rows.completions[row] == "\n".join([tokenizer.decode(turn)] * num_turns)
        is_trained = columns["loss_mask"][at, number] > 0
        assert columns["targets"][at, number][is_trained].tolist() == written
        assert is_trained.sum() == sum(mask) == np.count_nonzero(columns["sampler_logps"][at, number])
        earned = 0.0 if row % 4 == 3 else sum(0.25 * turn_number for turn_number in range(1, num_turns + 1))
        expected = RECORDS[n]["worth"] * number + earned
        assert columns["rewards"][at, number] == expected == scores["reward"][row]
        assert scores["environment"][row] == earned
        assert logged_rows.completions[row] == rows.completions[row]
    of_groups = scores["reward"].reshape(-1, GROUP)
    np.testing.assert_allclose(advantages, (of_groups - of_groups.mean(axis=1, keepdims=True)).ravel())
    assert batches.metrics()["train/rewards/environment"] == pytest.approx(scores["environment"].mean())


def test_an_environment_may_give_the_only_reward(opened, monkeypatch):
    monkeypatch.setattr(config_of_rollouts, "Rewards", Rewards)
    assert ToolEnvironmentConfig(reward_per_call=0.5).gives_rewards
    keys = {"environment": AnswersConfig(), "max_turns": 1, "rewards": []}
    (columns,), _ = trained_on(opened(**keys)[1], [0])
    assert columns["rewards"].ravel().tolist() == [0.0 if row % 4 == 3 else 0.25 for row in range(12)]


def test_what_is_open_is_closed_if_a_start_fails(opened, monkeypatch):
    closed: list[str] = []

    def fail(self, existing):
        raise ConfigError("no such column")

    monkeypatch.setattr(Scored, "check_columns", fail)
    monkeypatch.setattr(Scored, "close", lambda self: closed.append("rewards"))
    monkeypatch.setattr(Scripted, "close", lambda self: closed.append("sampler"))
    with pytest.raises(ConfigError, match="no such column"):
        opened()
    assert closed == ["rewards", "sampler"]


def trained_on(batches, steps):
    """The columns of each step, refreshed when due; and the steps that were refreshed."""
    found, refreshed = [], []
    for step in steps:
        if batches.due(step):
            batches.refresh(f"weights {step}", step)
            refreshed.append(step)
        found.append(columns_of(next(batches)))
    return found, refreshed


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        for name, column in mine.items():
            np.testing.assert_array_equal(column, other[name], err_msg=name)


@pytest.mark.slow
def test_a_rollout_is_trained_on_in_minibatches_and_restored_in_the_middle(opened):
    keys = {"updates_per_rollout": 4, "minibatches_per_rollout": 2}
    _, batches = opened(**keys)
    whole, refreshed = trained_on(batches, range(10))
    assert refreshed == [0, 4, 8]
    assert_same(whole[0:2], whole[2:4])
    assert not np.array_equal(whole[0]["tokens"], whole[1]["tokens"])
    assert not np.array_equal(whole[0]["tokens"], whole[4]["tokens"])
    _, first = opened(**keys)
    for step in range(10):
        state = json.loads(json.dumps(first.state()))
        assert ("rollout" in state) == (step % 4 > 0)
        _, resumed = opened(step=step, **keys)
        resumed.restore(state)
        assert_same(trained_on(resumed, range(step, 10))[0], whole[step:])
        trained_on(first, [step])
    assert first.records(9).startswith("sequences ")
    # Another size of groups, other prompts, or another number of rewards: the rollout does not fit, and another is sampled.
    reordered = [record | {"prompt": record["prompt"][::-1]} for record in RECORDS]
    rewards = [FunctionRewardConfig(function="my_rewards:score", name=name) for name in ("worth", "again")]
    for changed in ({"group_size": 2}, {"records": reordered}, {"rewards": rewards}):
        lines: list[str] = []
        _, other = opened(step=2, log=lines.append, **keys | changed)
        _, again = opened(**keys)
        trained_on(again, range(2))
        other.restore(again.state())
        assert other.due(2)
        assert any("so a new one is sampled" in line for line in lines)


def test_rewards_get_the_columns_of_all_records(opened, seen):
    records = [{"prompt": f"Q{n}", "worth": 1, **({"n": n} if n == 39 else {})} for n in range(40)]
    _, batches = opened(records, sizes=((0, 2),))
    trained_on(batches, range(2))
    assert [set(rows.columns) for rows in seen] == [{"worth", "n"}] * 2
    assert None in seen[0].columns["n"]


def test_a_rollout_ends_where_the_batch_size_changes_and_skipped_prompts_are_left_out(opened):
    _, batches = opened(sizes=((0, 4), (3, 6)), updates_per_rollout=2)
    found, refreshed = trained_on(batches, range(5))
    assert refreshed == [0, 2, 3]
    assert [len(columns["tokens"]) for columns in found] == [4, 4, 4, 6, 6]
    _, skipping = opened(updates_per_rollout=2)
    trained_on(skipping, [0])
    skipping.skip(3)
    assert skipping.due(1)
    assert skipping.state() == {"examples": 4 + 12, "step": 1, "skipped": 12}


def test_groups_with_equal_rewards_are_replaced_as_long_as_rounds_are_left(opened, seen):
    """A quarter of the records is worth nothing."""
    _, batches = opened(sizes=((0, 8),), dynamic_sampling=5)
    (columns,), _ = trained_on(batches, [0])
    assert (columns["rewards"].max(axis=1) > columns["rewards"].min(axis=1)).all()
    rounds = len(SAMPLER.requests)
    assert 1 < rounds < 6
    assert [list(request.rows) for _, _, request in SAMPLER.requests] == [
        list(range(24 * number, 24 * (number + 1))) for number in range(rounds)
    ]
    worth = [value for rows in seen for value in rows.columns["worth"][::GROUP]]
    expected = [value for value in worth if value][:8]
    assert columns["rewards"][:, 1].tolist() == expected
    metrics = batches.metrics()
    assert metrics["train/dynamic_sampling/num_prompts"] == 8 * rounds == batches.state()["examples"]
    assert metrics["train/dynamic_sampling/frac_equal"] == worth.count(0) / len(worth)


def test_groups_with_equal_rewards_only_are_trained_on_when_no_round_is_left(opened):
    worthless = [record | {"worth": 0} for record in RECORDS]
    _, batches = opened(worthless, dynamic_sampling=2)
    (columns,), _ = trained_on(batches, [0])
    assert not columns["rewards"].any()
    assert len(SAMPLER.requests) == 3
    assert batches.metrics()["train/dynamic_sampling/frac_equal"] == 1
    assert [list(prompt) for prompt in SAMPLER.requests[0][1][::GROUP]] == [
        row[: len(prompt)].tolist()
        for row, prompt in zip(columns["tokens"][:, 0], SAMPLER.requests[0][1][::GROUP], strict=True)
    ]


def test_prompts_that_are_too_long_are_refused_with_their_place_or_left_out(opened, seen):
    records = [*RECORDS[:6], {"prompt": "word " * 60, "worth": 1, "n": 6}, *RECORDS[7:12]]
    with pytest.raises(
        ConfigError, match=r"data\.max_new_tokens: 8 given, but the prompt of \d+ tokens in document 7 of"
    ):
        opened(records)
    lines = []
    data, batches = opened(records, log=lines.append, long_prompts="leave_out")
    assert any("11 prompts of" in line and "1 left out: they are too long" in line for line in lines)
    assert len(data.train[""]) == 11
    trained_on(batches, range(3))
    numbers = [n for rows in seen for n in rows.columns["n"][::GROUP]]
    assert sorted(numbers[:11]) == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    pairs = [pair for rows in seen for pair in zip(rows.places, rows.columns["n"], strict=True)]
    assert all(place.endswith(f"line {n + 1}") for place, n in pairs)


def test_messages_are_rendered_up_to_the_answer(opened, tokenizer):
    records = [{"q": [{"role": "user", "content": f"hi {n}"}], "worth": 1, "n": n} for n in range(8)]
    data, _ = opened(records, format=PromptsFormat(prompt_field="q", chat_template=CHATML))
    _, text = data.train[""].show(2, tokenizer)
    assert text.partition("\n")[2] == "<|user|>hi 2<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_turns": 3}, r"data\.max_turns: 3 given without environment"),
        (
            {"environment": AnswersConfig(), "rewards": [FunctionRewardConfig(function="a:b", name="environment")]},
            r"data\.rewards: the name 'environment' is that of the environment's reward",
        ),
        ({"rewards": []}, r"data\.rewards: empty\. Give at least one"),
        (
            {"rewards": [], "environment": ToolEnvironmentConfig()},
            r"data\.rewards: empty, and the environment gives no rewards either\. Give at least one",
        ),
        (
            {"updates_per_rollout": 3, "minibatches_per_rollout": 2},
            r"data\.updates_per_rollout: 3 given, a multiple of",
        ),
        (
            {"id": "org/name", "train_urls": []},
            r"given \(validation_split: 'validation' is the default; null means none\), but",
        ),
        ({"num_validation_sequences": 2}, r"data: validation data given, but data\.type: rollouts has none"),
        (
            {"stop_strategy": "first_exhausted", "dynamic_sampling": 1},
            r"data\.stop_strategy: first_exhausted given, but not every step trains on as many new prompts",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sections_that_cannot_work_are_refused(opened, keys, message):
    with pytest.raises(ConfigError, match=message):
        opened(**keys)


def test_numbers_out_of_range_are_refused():
    for key, value in {"group_size": 1, "temperature": 0, "max_new_tokens": 0, "dynamic_sampling": -1}.items():
        with pytest.raises(ConfigError, match=rf"{key}: {value} given"):
            decode(DataConfig, ConfigSource({"type": "rollouts", key: value}))
