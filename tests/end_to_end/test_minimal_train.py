"""`examples/minimal_train.py` trains as `jaxlm train` does, bit for bit, and either continues the other's checkpoints."""

import ast
import functools
import signal
from pathlib import Path

import pytest

from examples import minimal_train
from tests.end_to_end.commands import Uninterrupted, Workplace
from tests.tiers import one_of

MINIMAL = "examples.minimal_train"
ARGUMENTS = ("--config_path", "run.yaml")
PHASES = """
phases:
  - {name: whole, num_train_steps: 10}
  - name: adapt
    num_train_steps: 14
    surgery: [{type: lora, rank: 2}]
    trainable: ['\\.[ab]$']
"""


@pytest.fixture(scope="module")
def of_train(workplace, uninterrupted):
    """`jaxlm train`, once for each number of devices."""

    @functools.cache
    def run(devices: int) -> Uninterrupted:
        if devices == 1:
            return uninterrupted
        place = workplace(devices)
        place.write()
        place.finish(*ARGUMENTS)
        return Uninterrupted(place, place.losses(), place.digest("step-24"))

    return run


def stop(place: Workplace, after: int) -> None:
    """Runs the example until SIGTERM comes, so that it saves and stops after a step."""
    # The step before is logged while this one is under way.
    environment = {"JAXLM_TEST_SIGNAL_AT": str(after - 1)}
    result = place.run(*ARGUMENTS, module="tests.end_to_end.signaled_minimal", **environment)
    assert result.code == 128 + signal.SIGTERM, result.err
    assert max(place.losses()) == after
    assert f"step-{after}" in place.checkpoints()


def check_same(place: Workplace, expected: Uninterrupted) -> None:
    assert list(expected.losses) == list(range(1, 25))
    assert place.losses() == expected.losses
    assert place.digest("step-24") == expected.digest


@pytest.mark.slow
@pytest.mark.parametrize("devices", one_of([1, 8]))
def test_it_trains_as_jaxlm_train_does(workplace, of_train, devices):
    place = workplace(devices)
    place.write()
    place.finish(*ARGUMENTS, module=MINIMAL)
    check_same(place, of_train(devices))
    assert place.checkpoints() == of_train(devices).place.checkpoints()
    place.finish(*ARGUMENTS, module=MINIMAL)  # there is nothing left to train
    check_same(place, of_train(devices))


@pytest.mark.soak
@pytest.mark.parametrize("devices", one_of([1, 8]))
def test_it_goes_on_after_a_stop(workplace, of_train, devices):
    place = workplace(devices)
    place.write()
    stop(place, after=12)
    assert "resuming, from" in place.finish(*ARGUMENTS, module=MINIMAL).out
    check_same(place, of_train(devices))


@pytest.mark.soak
@pytest.mark.parametrize("devices", [8, 1])
def test_each_goes_on_where_the_other_has_stopped(workplace, of_train, devices):
    place = workplace(devices)
    place.write()
    stop(place, after=7)
    place.stop(*ARGUMENTS, at=17)  # `jaxlm train`
    assert "resuming, from" in place.finish(*ARGUMENTS, module=MINIMAL).out
    check_same(place, of_train(devices))


@pytest.mark.soak
def test_it_enters_phases(workplace):
    expected, place = workplace(), workplace()
    for each in (expected, place):
        each.write(PHASES)
    expected.finish(*ARGUMENTS)
    stop(place, after=16)
    place.finish(*ARGUMENTS, module=MINIMAL)
    check_same(place, Uninterrupted(expected, expected.losses(), expected.digest("step-24")))
    assert any(path.endswith(".a") for path in place.digest("step-24"))
    assert place.digest("step-10") == expected.digest("step-10")


@pytest.mark.soak
def test_two_processes_stop_after_the_same_step(workplace, two_processes):
    place = workplace()
    place.write()
    # The signal comes to process 0 alone, which logs the steps.
    ends = place.run_all(2, *ARGUMENTS, module="tests.end_to_end.signaled_minimal", JAXLM_TEST_SIGNAL_AT="9")
    assert [end.code for end in ends] == [128 + signal.SIGTERM] * 2, ends
    assert 9 < max(place.losses()) < 24
    ends = place.run_all(2, *ARGUMENTS, module=MINIMAL)
    assert [end.code for end in ends] == [0, 0], ends
    assert place.losses() == two_processes.losses
    assert place.digest("step-24") == two_processes.digest


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (("--trainer.until", "{metric: eval/loss, patience: 2}"), "has controllers, `until` or `rewind_after`"),
        (("--optimizer.skip_bad_steps", "{rewind_after: 3}"), "has controllers, `until` or `rewind_after`"),
        (("--dry_run", "true"), "dry_run: true has no effect here"),
    ],
)
def test_what_would_train_differently_is_refused(in_process, workplace, option, reason):
    place = workplace()
    place.write()
    result = in_process(minimal_train.main, place, *ARGUMENTS, *option)
    assert result.code == 2, result.err
    assert reason in result.err
    assert place.checkpoints() == []


def test_it_is_short_and_uses_only_public_names():
    source = Path(minimal_train.__file__).read_text()
    assert len(source.splitlines()) <= 300
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom():
                names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            case ast.Attribute():
                names.add(node.attr)
    assert "jaxlm" in names
    assert [name for name in sorted(names) if name.startswith("_")] == []
    assert "jaxlm.train" not in source.replace("`jaxlm.train", "")
