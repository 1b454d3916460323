"""Curricula of rollouts: which prompts they accept, what they remember, and what a resumed run does."""

import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.systems.rl.curricula import (
    CurriculumConfig,
    CurriculumContext,
    DifficultyConfig,
    PromptNumbers,
    PromptOrder,
    SuccessConfig,
)
from tests.systems.rl.test_rollouts import GROUP, RECORDS, assert_same, opened, seen, trained_on  # noqa: F401 (fixtures)

GROWING = DifficultyConfig("n", first_share=0.25, full_after=4)
SELECTIVE = SuccessConfig(easy=0.9, hard_share=0.01)
SEED = 3  # of `opened`


def sampled(seen, sizes):  # noqa: F811
    """The numbers of the records that each rollout has sampled for. Args: sizes: rounds of each rollout."""
    rounds = iter([rows.columns["n"][::GROUP] for rows in seen])
    return [[n for _ in range(size) for n in next(rounds)] for size in sizes]


def in_order(data, number):
    """The numbers of the records in the order of training, from the source's own order."""
    mixture = data.mixture(BatchSchedule.of([BatchSize(0, 4)]), seed=SEED)
    _, indices = mixture.find(np.arange(number))
    return indices.tolist()


def test_every_curriculum_and_key_has_a_test():
    known = {
        name: [field.name for field in dataclasses.fields(kind)]
        for name, kind in CurriculumConfig.get_known_choices().items()
        if ":" not in name
    }
    assert known == {
        "difficulty": ["column", "first_share", "full_after", "hardest_first"],
        "success": ["solved_at", "easy", "hard", "easy_share", "hard_share", "momentum"],
    }


@pytest.mark.parametrize("hardest_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_harder_prompts_are_added_step_by_step(opened, seen, hardest_first):  # noqa: F811
    data, batches = opened(curriculum=dataclasses.replace(GROWING, hardest_first=hardest_first))
    measured = []
    for step in range(6):
        trained_on(batches, [step])
        measured.append(dict(batches.metrics()))
    # A quarter of 40 records; then 0.4375, 0.625 and 0.8125 of them, rounded up; then all.
    easiest = [10, 18, 25, 33, 40, 40]
    expected, following = [], iter(enumerate(in_order(data, 400)))
    at = 0
    for step, most in enumerate(easiest):
        chosen: list[int] = []
        before = at
        while len(chosen) < 4:
            number, n = next(following)
            at = number + 1
            if (39 - n if hardest_first else n) < most:
                chosen.append(n)
        expected.append(chosen)
        assert measured[step]["train/curriculum/share"] == most / 40
        assert measured[step]["train/curriculum/passed_over"] == at - before - 4
    assert sampled(seen, [1] * 6) == expected
    assert batches.state()["examples"] == at


def test_equally_hard_prompts_count_together():
    values = [np.array([1.0, 1.0, 2.0]), np.array([2.0, 3.0])]
    context = CurriculumContext(0, 10, ["a", "b"], lambda column: values)
    curriculum = DifficultyConfig("level", first_share=0.5, full_after=10).open(context)
    prompts = PromptNumbers(np.arange(5), np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 1]))
    assert curriculum.accepts(prompts, 10).tolist() == [True, True, True, True, False]  # the third of five is a 2
    assert curriculum.accepts(prompts, 20).all()
    assert curriculum.metrics(10) == {"share": 0.8}


def test_prompts_that_are_never_solved_are_passed_over(opened, seen):  # noqa: F811
    """Records are worth n % 4 times the number of the response: a quarter is never solved, and the others at 2/3."""
    data, batches = opened(sizes=((0, 8),), curriculum=SELECTIVE)
    trained_on(batches, range(5))  # each prompt once
    metrics = batches.metrics()
    assert sorted(itertools.chain(*sampled(seen, [1] * 5))) == list(range(40))
    assert metrics["train/curriculum/passed_over"] == 0
    assert (metrics["train/curriculum/num_seen"], metrics["train/curriculum/frac_hard"]) == (40, 0.25)
    assert metrics["train/curriculum/frac_easy"] == 0
    trained_on(batches, range(5, 20))
    later = list(itertools.chain(*sampled(seen, [1] * 20)))[40:]
    hard = [n for n in later if n % 4 == 0]
    assert len(hard) < 6  # of 40 without a curriculum
    following = [n for n in in_order(data, 400)[40:] if n % 4]
    others = [n for n in later if n % 4]
    assert others == following[: len(others)]


def test_with_shares_of_1_nothing_is_passed_over(opened, seen):  # noqa: F811
    for curriculum in (None, dataclasses.replace(SELECTIVE, easy=0.6, easy_share=1.0, hard_share=1.0)):
        _, batches = opened(curriculum=curriculum)
        trained_on(batches, range(25))
    rounds = sampled(seen, [25, 25])
    assert rounds[0] == rounds[1]


def test_easy_prompts_are_accepted_at_their_share_and_drawn_anew_in_each_epoch():
    curriculum = SuccessConfig(easy_share=0.3, hard_share=0.05).open(
        CurriculumContext(SEED, 0, ["a", "b"], lambda column: [])
    )
    prompts = PromptNumbers(np.arange(4000), np.zeros(4000, int), np.arange(4000))
    assert curriculum.accepts(prompts, 0).all()
    curriculum.learn(prompts, np.repeat([[1.0, 2.0], [0.5, -1.0], [0.0, 1.0]], [2000, 1000, 1000], axis=0))
    found = curriculum.accepts(prompts, 0)
    assert found[3000:].all()
    assert abs(found[:2000].mean() - 0.3) < 0.04  # four standard errors
    assert abs(found[2000:3000].mean() - 0.05) < 0.03
    next_epoch = curriculum.accepts(prompts._replace(examples=prompts.examples + 4000), 0)
    assert 0.5 < (found[:2000] == next_epoch[:2000]).mean() < 0.7  # 0.3 ** 2 + 0.7 ** 2
    np.testing.assert_array_equal(curriculum.accepts(prompts, 7), found)


def test_a_rate_keeps_some_of_its_old_value():
    curriculum = SuccessConfig(solved_at=0.5, momentum=0.75).open(
        CurriculumContext(SEED, 0, ["a", "b"], lambda column: [])
    )
    prompt = PromptNumbers(np.array([7]), np.array([1]), np.array([3]))
    rates = []
    for rewards in ([1.0, 0.5], [0.4, 0.0], [0.0, 9.0]):
        curriculum.learn(prompt, np.array([rewards]))
        rates.append(curriculum._rates[1, 3])
    assert rates == [1.0, 0.75, 0.75 * 0.75 + 0.25 * 0.5]


@pytest.mark.parametrize(
    "curriculum", [pytest.param(GROWING, marks=pytest.mark.slow), SELECTIVE], ids=["difficulty", "success"]
)
def test_a_resumed_curriculum_goes_on_as_if_nothing_had_happened(opened, curriculum):  # noqa: F811
    keys: Any = {"curriculum": curriculum, "dynamic_sampling": 2, "sizes": ((0, 8),)}
    _, batches = opened(**keys)
    whole, _ = trained_on(batches, range(14))
    end = batches.state()
    _, first = opened(**keys)
    for step in (0, 3, 9, 12):
        trained_on(first, range(first.state()["step"], step))
        state = json.loads(json.dumps(first.state()))
        _, resumed = opened(step=step, **keys)
        trained_on(resumed, [step])  # what it has learned until it goes back is forgotten
        resumed.restore(state)
        assert_same(trained_on(resumed, range(step, 14))[0], whole[step:])
        assert resumed.state() == end


def test_a_curriculum_that_accepts_nothing_ends_the_run():
    mixture: Any = SimpleNamespace(names=("",), examples_of=lambda number: range(3), find=lambda e: (e * 0, e % 3))
    nothing: Any = SimpleNamespace(accepts=lambda prompts, step: np.zeros(len(prompts.examples), bool))
    with pytest.raises(ConfigError, match=r"data\.curriculum: at step 5, it accepts none of 13,400 prompts in turn"):
        PromptOrder(mixture, nothing).take(10, 2, 5)


@pytest.mark.parametrize(
    ("curriculum", "records", "message"),
    [
        (
            SuccessConfig(easy=0.4, hard=0.5),
            RECORDS,
            r"data\.curriculum\.easy: 0\.4 given, but hard is 0\.5.*hard < easy",
        ),
        (
            GROWING,
            [*RECORDS[:4], RECORDS[4] | {"n": "hard"}, *RECORDS[5:]],
            r"data\.curriculum\.column: n given, a finite number in every record expected, but .*line 5 has 'hard'",
        ),
        (
            dataclasses.replace(GROWING, column="level"),
            RECORDS,
            r"column: level given, .*line 1 has only worth, n besides the prompt",
        ),
    ],
)
def test_curricula_that_cannot_work_are_refused(opened, curriculum, records, message):  # noqa: F811
    with pytest.raises(ConfigError, match=message):
        opened(records, curriculum=curriculum)


def test_rates_stay_with_the_names_of_their_sources():
    def of_sources(*names):
        return SuccessConfig().open(CurriculumContext(SEED, 0, names, lambda column: []))

    before = of_sources("a", "b")
    numbers = np.array([0, 0, 1]), np.array([4, 5, 4])
    before.learn(PromptNumbers(np.arange(3), *numbers), np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]))
    state = json.loads(json.dumps(before.state()))
    after = of_sources("b", "c")
    after.restore(state)
    assert after.metrics(0) == {"num_seen": 1, "frac_easy": 0, "frac_hard": 0}
    swapped = of_sources("b", "a")
    swapped.restore(state)
    again = of_sources("a", "b")
    again.restore(json.loads(json.dumps(swapped.state())))
    assert again.state()["rates"] == state["rates"]
    assert again.state()["prompts"] == state["prompts"]
