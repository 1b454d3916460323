"""Schedules against published values, a float64 reimplementation, and properties that hold for all schedules."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.schedules import (
    Cosine,
    InvSqrt,
    MomentumSchedule,
    Polynomial,
    Power,
    ScheduleSpec,
    cycle_boundaries,
    make_schedule,
)
from jaxlm.plan.load_config import load_config, read_config
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode, dump, encode
from jaxlm.reading.yaml import ConfigSource

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "lr_schedules.json").read_text())
PUBLISHED = {"learning_rate": 6e-4}  # their only default that differs from the guide
NO_ERROR = {"E13_linear_decay_zero"}  # listed among the errors but valid: stays at the peak


def adam(optimizer: dict) -> AdamConfig:
    config: Any = decode(RunConfig, ConfigSource({"optimizer": {"type": "adam", **PUBLISHED, **optimizer}})).optimizer
    return config


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_known_values(case):
    config = adam(case["optimizer"])
    schedule = config.schedule(case["num_train_steps"])
    # Where the source loses its warmup, the corrected values.
    steps, expected = zip(*case.get("values_clamped_upstream_2026", case["values"]), strict=True)
    atol = 1e-6 * config.learning_rate
    np.testing.assert_allclose([schedule(s) for s in steps], expected, rtol=1e-5, atol=atol)
    traced = jax.jit(jax.vmap(schedule))(np.array(steps))
    np.testing.assert_allclose(traced, expected, rtol=1e-5, atol=atol)
    assert cycle_boundaries(config.cycles, config.cycle_length, case["num_train_steps"]) == case["cycle_minima"]


@pytest.mark.parametrize("case", VECTORS["error_cases"], ids=lambda case: case["name"])
def test_known_errors(case):
    if case["name"] in NO_ERROR:
        config = adam(case["optimizer"])
        values = [float(config.schedule(case["num_train_steps"])(s)) for s in (0, 500, 1000)]
        np.testing.assert_allclose(values, 6e-4, rtol=1e-6)
    else:
        with pytest.raises(ConfigError, match=r"optimizer"):
            adam(case["optimizer"]).schedule(case["num_train_steps"])


def by_hand(shape: ScheduleSpec, num_steps: int, points: list[int]) -> np.ndarray:
    """All values in float64, segment by segment, computed from the specification alone."""
    steps = lambda value, n: int(value * n) if isinstance(value, float) and value <= 1 else int(value)  # noqa: E731
    ratio, peak, before, values = shape.min_ratio, shape.peak, 0.0, []
    for k, (a, b) in enumerate(itertools.pairwise(points)):
        n = b - a
        w = min(steps(shape.rewarmup if k else shape.warmup, n), n)
        d = n - w if shape.decay is None else min(steps(shape.decay, n), n - w)

        def falling(t, d=d, w=w):
            if shape.kind == "constant":
                return peak
            if shape.kind == "linear":
                return peak + (ratio * peak - peak) * t / d
            if shape.kind == "cosine":
                return ratio * peak + (peak - ratio * peak) * (1 + math.cos(math.pi * t / d)) / 2
            if shape.kind == "inv_sqrt":
                return max(peak * min(1, math.sqrt(10_000 / max(t + w, 1))), ratio * peak)
            if shape.kind == "inv":
                return peak / (1 + (1 / ratio - 1) * max(t, 1) / d)
            raise AssertionError(shape.kind)

        for t in range(n):
            if t < w:
                values.append(before + (peak - before) * t / w)
            elif t < n - d:
                values.append(peak)
            else:
                values.append(falling(t - (n - d)))
        before = falling(d) if d else peak
    return np.array([*values, before])


MOST_STEPS = 200
LENGTHS = st.one_of(st.floats(0, 1), st.integers(0, 300))
SHAPES = st.builds(
    ScheduleSpec,
    peak=st.floats(1e-6, 10),
    warmup=LENGTHS,
    decay=st.one_of(st.none(), LENGTHS),
    kind=st.sampled_from(["constant", "linear", "cosine", "inv_sqrt", "inv"]),
    min_ratio=st.floats(0.01, 1),
    rewarmup=LENGTHS,
)
CYCLES = st.one_of(
    st.just({}),
    st.builds(lambda n: {"cycles": n}, st.integers(1, 9)),
    st.builds(lambda low: {"cycles": sorted(low)}, st.sets(st.integers(1, 200), max_size=6)),
    st.builds(lambda n: {"cycle_length": n}, st.one_of(st.floats(0.01, 1), st.integers(1, 250))),
    st.builds(lambda lengths: {"cycle_length": lengths}, st.lists(st.integers(1, 60), max_size=5)),
)


def check_schedule(shape: ScheduleSpec, cycles: dict, num_steps: int) -> None:
    shape = ScheduleSpec(**vars(shape) | cycles)
    try:
        schedule = make_schedule(shape, num_steps)
    except ConfigError:
        assume(False)
        raise
    points = cycle_boundaries(shape.cycles, shape.cycle_length, num_steps)
    values = np.asarray(schedule(np.arange(MOST_STEPS + 1)), np.float64)[: num_steps + 1]
    peak = shape.peak
    np.testing.assert_allclose(values, by_hand(shape, num_steps, points), rtol=1e-5, atol=1e-6 * peak)
    assert np.all((values >= 0) & (values <= np.float32(peak)))
    assert float(schedule(10**6)) == np.float32(values[-1])
    segments = schedule.segments
    # The table covers every step once.
    assert segments[0].start == 0
    assert segments[-1].end == num_steps
    assert all(before.end == after.start and before.length > 0 for before, after in itertools.pairwise(segments))
    for before, after in zip((None, *segments), segments, strict=False):
        low, high = values[after.start], values[after.end]
        inside = values[after.start : after.end]
        if after.name in ("warmup", "rewarmup"):
            assert np.all(np.diff(inside) >= -1e-6 * peak)
            last = 0.0 if before is None else before.last
            assert low == pytest.approx(last, rel=1e-5, abs=1e-6 * peak)  # starts where the previous cycle ended
        elif after.name == "stable":
            np.testing.assert_allclose(inside, peak, rtol=1e-6)
        else:
            assert np.all(np.diff(inside) <= 1e-6 * peak)
        if after.name == "warmup" and after.end < num_steps and shape.kind in ("constant", "linear", "cosine"):
            assert high == pytest.approx(peak, rel=1e-5)  # the peak is reached


@pytest.mark.slow
@settings(max_examples=25)
@given(shape=SHAPES, cycles=CYCLES, num_steps=st.integers(1, MOST_STEPS))
@example(ScheduleSpec(1.0, 0, 1.0, "linear", 0.1), {"cycles": [199]}, 200)
def test_random_schedules(shape, cycles, num_steps):
    check_schedule(shape, cycles, num_steps)


@pytest.mark.soak
@settings(max_examples=5000)
@given(shape=SHAPES, cycles=CYCLES, num_steps=st.integers(1, MOST_STEPS))
def test_five_thousand_random_schedules(shape, cycles, num_steps):
    check_schedule(shape, cycles, num_steps)


def test_a_length_of_one_point_zero_is_the_whole_cycle():
    schedule = make_schedule(ScheduleSpec(1.0, 1.0, None, "linear", 0.1), 100)
    assert [s.name for s in schedule.segments] == ["warmup"]
    assert float(schedule(50)) == pytest.approx(0.5)
    assert cycle_boundaries(None, 1.0, 100) == [0, 100]
    (note,) = schedule.notes  # printed at every start
    assert note.startswith("optimizer.warmup: 1.0 means the whole cycle: the learning rate rises over all")
    with pytest.raises(ConfigError, match=r"Allowed: a fraction from 0\.0 to 1\.0, or a whole number of steps"):
        make_schedule(ScheduleSpec(1.0, 1.5, None, "linear", 0.1), 100)


LENGTH_KEYS = {  # section with a length of 1 in 10 steps -> the rates of steps 0, 1, 5 and 9
    "warmup": ({"warmup": 1}, [0.0, 1.0, 5 / 9, 1 / 9]),
    "decay": ({"warmup": 0, "decay": 1}, [1.0, 1.0, 1.0, 1.0]),
    "rewarmup": ({"warmup": 0, "rewarmup": 1, "cycles": [5]}, [1.0, 0.8, 0.0, 0.25]),
    "cycle_length": ({"warmup": 0, "cycle_length": 1}, [1.0, 1.0, 1.0, 1.0]),
}


@pytest.mark.trap("T5")
@pytest.mark.parametrize("key", LENGTH_KEYS)
@pytest.mark.parametrize("written", ["file", "command line", "config.yaml"])
def test_the_integer_1_is_one_step_and_1_point_0_is_all_of_them(key, written, tmp_path):
    section, rates = LENGTH_KEYS[key]

    def schedule(length: int | float):
        keys = {"learning_rate": 1.0, "lr_schedule": "linear", "min_lr_ratio": 0.0, **section, key: length}
        options = [f"--optimizer.{key}", str(keys.pop(key))] if written == "command line" else []
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({"optimizer": keys}))
        config = load_config(["--config_path", str(file), *options], "jaxlm.train")
        if written == "config.yaml":
            file.write_text(dump(config))
            config = read_config(file)
        assert type(getattr(config.optimizer, key)) is type(length)
        return config.optimizer.schedule(10)

    one_step, everything = schedule(1), schedule(1.0)
    np.testing.assert_allclose([one_step(step) for step in (0, 1, 5, 9)], rates, atol=1e-7)
    assert f"optimizer.{key}: 1 means one step. For all steps, which it means in Levanter, write 1.0" in one_step.notes
    assert not any("one step" in note for note in everything.notes)
    assert not np.allclose([one_step(step) for step in range(10)], [everything(step) for step in range(10)])


def test_the_momentum_rises_over_one_update_or_over_all():
    rate = adam({"learning_rate": 1.0}).schedule(10)
    for warmup, expected in ((1, 0.9), (1.0, 0.55)):
        momentum = MomentumSchedule(initial=0.2, warmup=warmup).build(0.9, rate, 10)
        assert float(momentum(np.int32(5))) == pytest.approx(expected)


@pytest.mark.trap("D23")
def test_a_decay_of_the_whole_cycle_keeps_the_warmup():
    schedule = make_schedule(ScheduleSpec(1.0, 0.1, 1.0, "linear", 0.1), 1000)
    assert [float(schedule(s)) for s in (0, 50, 100)] == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.trap("D24")
def test_a_warmup_longer_than_its_cycle_is_clamped():
    for kind in ("linear", "cosine"):
        schedule = make_schedule(ScheduleSpec(1.0, 300, None, kind, 0.1, cycles=[100]), 200)
        (note,) = schedule.notes
        assert note.startswith(
            "optimizer.warmup: 300 is cut to the length of the cycle: the learning rate rises over all"
        )
        assert [float(schedule(s)) for s in (0, 50, 99, 100, 200)] == pytest.approx([0, 0.5, 0.99, 1.0, 0.1])


@pytest.mark.trap("D13")
def test_an_integer_number_of_cycles_divides_the_run():
    assert cycle_boundaries(4, None, 1000) == [0, 250, 500, 750, 1000]  # not the guide's N / (c + 1)


@pytest.mark.trap("D25")
def test_the_last_cycle_takes_the_remaining_steps():
    assert cycle_boundaries(None, 300, 1000) == [0, 300, 600, 1000]
    assert cycle_boundaries(None, [300, 100], 1000) == [0, 300, 400, 1000]


@pytest.mark.parametrize(
    ("cycles", "length"),
    [
        ([300, 200], None),
        ([0, 500], None),
        ([300, 300], None),
        ([1000, 1001], None),
        (0, None),
        (1001, None),
        (None, 0),
        (None, 0.0001),
        (None, [600, 600]),
        (None, [0, 5]),
        (None, [-5, 10]),
    ],
)
@pytest.mark.trap("D26")
def test_cycle_boundaries_that_do_not_fit_are_errors(cycles, length):
    with pytest.raises(ConfigError, match="cycle"):
        cycle_boundaries(cycles, length, 1000)


def test_cycles_are_given_in_one_way():
    with pytest.raises(ConfigError, match=r"optimizer\.cycles: 2 given together with cycle_length: 0\.5"):
        adam({"cycles": 2, "cycle_length": 0.5})


def test_the_first_update_has_rate_zero_and_the_last_one_is_close_to_the_minimum():
    schedule = make_schedule(ScheduleSpec(1.0, 0.1, None, "linear", 0.1), 100)
    assert float(schedule(0)) == 0.0
    assert float(schedule(99)) == pytest.approx(0.1 + 0.9 / 90)
    assert float(schedule(100)) == pytest.approx(0.1)


def test_a_rewarmup_starts_at_the_minimum_and_a_cycle_without_one_jumps():
    for rewarmup, expected in ((10, [0.01 + 0.99 / 90, 0.01, 0.01 + 0.99 / 10]), (0, [0.01 + 0.99 / 90, 1.0, 0.9901])):
        shape = ScheduleSpec(1.0, 10, None, "linear", 0.01, rewarmup=rewarmup, cycles=[100])
        schedule = make_schedule(shape, 200)
        assert [float(schedule(s)) for s in (99, 100, 101)] == pytest.approx(expected, rel=1e-5)


def test_thousands_of_cycles_compile_to_one_lookup():
    small, large = (make_schedule(ScheduleSpec(1.0, 0.1, None, "cosine", 0.1, cycles=n), 10_000) for n in (2, 3000))
    lines = [len(str(jax.make_jaxpr(schedule)(3)).splitlines()) for schedule in (small, large)]
    assert lines[0] == lines[1]


class TestSections:
    """`lr_schedule` as a section with its own keys, against closed forms."""

    def value(self, section: dict, step: int, **keys) -> float:
        config = adam({"learning_rate": 1.0, "warmup": 0, "min_lr_ratio": 0.1, "lr_schedule": section} | keys)
        assert decode(AdamConfig, ConfigSource(_without_type(config))) == config
        return float(config.schedule(1000)(step))

    def test_cosine(self):
        assert self.value({"type": "cosine", "exponent": 3.0}, 250) == pytest.approx(
            0.1 + 0.9 * (0.5 * (1 + math.cos(math.pi / 4))) ** 3, rel=1e-5
        )

    def test_polynomial(self):
        assert self.value({"type": "polynomial", "power": 2.0}, 500) == pytest.approx(0.1 + 0.9 * 0.25, rel=1e-5)

    def test_inv_sqrt(self):
        assert self.value({"type": "inv_sqrt", "timescale": 100}, 400, warmup=200) == pytest.approx(0.5, rel=1e-5)
        assert self.value({"type": "inv_sqrt", "timescale": 1}, 999) == pytest.approx(0.1)

    def test_power(self):
        section = {"type": "power", "batch_size": 4, "seq_length": 8, "a": 0.5, "b": -0.5}
        assert self.value(section, 0) == 1.0
        assert self.value(section, 500) == pytest.approx(4 * 0.5 / math.sqrt(500 * 32), rel=1e-5)

    @pytest.mark.parametrize("name", ["constant", "linear", "inv"])
    def test_a_section_without_keys_is_the_name(self, name):
        assert self.value({"type": name}, 300) == self.value(name, 300)

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"type": "cosin"}, "Did you mean 'cosine'"),
            ({"type": "cosine", "timescale": 3}, "no such key"),
            ({"exponent": 2.0}, "no type given"),
            ({"type": "power"}, "'batch_size' is missing"),
            ({"type": "sgdr"}, "'first_decay' is missing"),
            ("sgdr", "needs keys. Set {type: sgdr, first_decay: ...}"),
            ("power", "needs keys. Set {type: power, batch_size: ..., seq_length: ...}"),
        ],
    )
    def test_invalid_sections_are_refused(self, wrong, named):
        with pytest.raises(ConfigError, match=named):
            self.value(wrong, 0)

    @pytest.mark.parametrize(
        "made",
        [
            lambda: Cosine(0),
            lambda: Polynomial(-1),
            lambda: InvSqrt(0),
            lambda: Power(1, 1, a=0),
            lambda: Power(1, 1, b=0.5),
        ],
    )
    def test_invalid_decay_parameters_are_refused(self, made):
        with pytest.raises(ConfigError, match="lr_schedule"):
            check_fields(made(), "optimizer.lr_schedule")


def _without_type(config: AdamConfig) -> dict:
    return {key: value for key, value in encode(config).items() if key != "type"}


# AstrAI's schedules (May 2026), computed by other code with a peak of 1, a warmup of 4 steps and a `min_rate` of 0.05.
ASTRAI_COSINE = (
    {"lr_schedule": "cosine", "min_lr_ratio": 0.0, "lr_floor": 0.05},
    20,
    {0: 0.05, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1, 8: 0.853553, 12: 0.5, 16: 0.146447, 20: 0.05},
)
ASTRAI_SGDR = (
    {"lr_schedule": {"type": "sgdr", "first_decay": 8, "t_mult": 2}, "min_lr_ratio": 0.05, "lr_floor": 0.05},
    80,  # the fourth decay is cut off
    {
        0: 0.05,
        1: 0.25,
        4: 1,
        8: 0.525,
        11: 0.086157,
        12: 1,
        20: 0.525,
        27: 0.059127,
        28: 1,
        44: 0.525,
        59: 0.052287,
        60: 1,
    },
)


@pytest.mark.parametrize(("keys", "num_steps", "expected"), [ASTRAI_COSINE, ASTRAI_SGDR])
def test_a_floor_and_warm_restarts_match_published_values(keys, num_steps, expected):
    schedule = adam({"learning_rate": 1.0, "warmup": 4, **keys}).schedule(num_steps)
    found = [float(schedule(step)) for step in expected]
    np.testing.assert_allclose(found, list(expected.values()), atol=1e-6)
    traced = jax.jit(jax.vmap(schedule))(np.array(list(expected)))
    np.testing.assert_allclose(traced, list(expected.values()), atol=1e-6)


def test_restarts_are_those_of_cycles_of_the_same_lengths_and_need_not_fill_the_run():
    keys = {"learning_rate": 1.0, "warmup": 4, "min_lr_ratio": 0.05}
    restarts = adam({**keys, "lr_schedule": {"type": "sgdr", "first_decay": 8, "t_mult": 2}}).schedule(60)
    cycles = adam({**keys, "cycle_length": [12, 16, 32]}).schedule(60)
    steps = np.arange(60)
    np.testing.assert_allclose(restarts(steps), cycles(steps), rtol=1e-6)
    equal = {"type": "sgdr", "first_decay": 7, "t_mult": 1}
    every_seven = adam({**keys, "warmup": 0, "lr_schedule": equal}).schedule(50)
    position = np.arange(50) % 7
    np.testing.assert_allclose(every_seven(np.arange(50)), 0.525 + 0.475 * np.cos(np.pi * position / 7), rtol=1e-5)


def test_the_floor_holds_in_warmups_and_decays():
    schedule = make_schedule(ScheduleSpec(2.0, 10, None, "linear", 0.0, rewarmup=10, cycles=2, floor=0.25), 100)
    plain = make_schedule(ScheduleSpec(2.0, 10, None, "linear", 0.0, rewarmup=10, cycles=2), 100)
    steps = np.arange(101)
    np.testing.assert_array_equal(schedule(steps), np.maximum(plain(steps), np.float32(0.5)))
    assert min(value for _, value, _ in schedule.corner_points()) == 0.5


def test_decay_ends_at_the_minimum_ratio():
    for kind in ("linear", "cosine", "inv"):
        assert float(make_schedule(ScheduleSpec(1.0, 10, None, kind, 0.25), 100)(100)) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"warmup": -0.1}, "warmup"),
        ({"decay": 1.5}, "decay"),
        ({"kind": "cosin"}, "lr_schedule"),
        ({"kind": "inv", "min_ratio": 0.0}, "min_lr_ratio"),
    ],
)
def test_invalid_schedules_are_refused(changes, named):
    shape = ScheduleSpec(**{"peak": 1.0, "warmup": 0.1, "decay": None, "kind": "cosine", "min_ratio": 0.1} | changes)
    with pytest.raises(ConfigError, match=named):
        make_schedule(shape, 100)


def test_corner_points_are_on_the_schedule():
    schedule = make_schedule(ScheduleSpec(1.0, 10, 20, "linear", 0.0), 100)
    assert [(step, name) for step, _, name in schedule.corner_points()] == [
        (0, "warmup begins"),
        (10, "stable begins"),
        (80, "decay begins"),
        (100, "end"),
    ]
    assert all(math.isclose(value, float(schedule(step))) for step, value, _ in schedule.corner_points())
