from datetime import timedelta

import pytest
import yaml

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.engine.checkpoint.policy import CheckpointerConfig, KeepRule, SaveClock, is_permanent
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource

RULES = [KeepRule(2, 10), KeepRule(5, 20), KeepRule(10)]


def test_which_steps_are_kept():
    assert [s for s in range(1, 50) if is_permanent(RULES, s)] == [2, 4, 6, 8, 10, 15, 20, 30, 40]
    assert not any(is_permanent([], s) for s in range(1, 50))
    assert [s for s in range(1, 50) if is_permanent([KeepRule(7, 21)], s)] == [7, 14, 21]


@pytest.mark.parametrize(
    ("keep", "named"),
    [
        ([KeepRule(2), KeepRule(5)], "keep.0.until"),
        ([KeepRule(2, 10), KeepRule(5, 10)], "until: 10 given, less than 10 of the next rule"),
    ],
)
def test_contradictory_rules_are_refused(keep, named):
    with pytest.raises(ConfigError, match=named):
        CheckpointerConfig(keep=keep).check()


def test_a_period_of_no_steps_is_refused():
    with pytest.raises(ConfigError, match=r"checkpointer\.keep\.0\.every: 0 given, an integer of 1 or more"):
        check_fields(CheckpointerConfig(keep=[KeepRule(0)]), "trainer.checkpointer")


def test_a_negative_interval_is_refused():
    with pytest.raises(ConfigError, match="save_interval"):
        CheckpointerConfig(save_interval=timedelta(seconds=-1)).check()


def test_the_clock_counts_from_the_last_save_of_any_kind():
    now = [0.0]
    clock = SaveClock(timedelta(seconds=10), lambda: now[0])
    now[0] = 9.9
    assert not clock.due()
    now[0] = 10.0
    assert clock.due()
    clock.reset()
    assert not clock.due()
    now[0] = 20.0
    assert clock.due()


@pytest.mark.trap("T1", "D8")
def test_reads_the_guides_keep_example():
    """Levanter fails on the example in its own documentation, whose last rule has no `until`."""
    text = """
    keep:
      - every: 1000  # steps
        until: 10000 # step
      - every: 5000  # steps
        until: 40000 # step
      - every: 10000
    """
    config = decode(CheckpointerConfig, ConfigSource(yaml.safe_load(text)))
    config.check()
    assert config.keep == [KeepRule(1000, 10_000), KeepRule(5000, 40_000), KeepRule(10_000)]
    assert [s for s in range(0, 60_001, 1000)[1:] if is_permanent(config.keep, s)][10:] == [
        *range(15_000, 40_001, 5000),
        50_000,
        60_000,
    ]


@pytest.mark.parametrize("written", ["15m", "15min", "900s", "15 minutes", "0:15:00", 900, 900.0, "900", "0.25h"])
@pytest.mark.trap("D21")
def test_every_format_of_save_interval(written):
    """Levanter refuses numbers."""
    assert decode(CheckpointerConfig, ConfigSource({"save_interval": written})).save_interval == timedelta(minutes=15)
