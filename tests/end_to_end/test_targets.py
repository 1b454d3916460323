"""Targets of one file, in the real command."""

import pytest
import yaml

from jaxlm import train
from tests.end_to_end.commands import Workplace

TARGETS = """
vars: {steps: 4, width: 32}
targets:
  quick: {vars: {steps: 2}}
  wide: {vars: {width: 64}}
entrypoints: {default: quick}
"""


def write_targets(place: Workplace) -> None:
    text = place.write(TARGETS).read_text()
    text = text.replace("num_train_steps: 24", "num_train_steps: ${steps}").replace(
        "hidden_dim: 32", "hidden_dim: ${width}"
    )
    (place.folder / "run.yaml").write_text(text)


@pytest.mark.slow
def test_a_target_trains_and_records_what_it_resolved_to(workplace, in_process):
    place = workplace(1)
    write_targets(place)
    place.finish("--config_path", "run.yaml")
    assert sorted(place.losses("run-quick")) == [1, 2]
    recorded = yaml.safe_load((place.folder / "logs" / "run-quick" / "config.yaml").read_text())
    assert (recorded["trainer"]["num_train_steps"], recorded["model"]["hidden_dim"]) == (2, 32)
    assert not {"vars", "targets", "entrypoints"} & recorded.keys()
    changed = in_process(
        train.main, place, "--config_path", "run.yaml", "--target", "wide", "--trainer.id", "run-quick"
    )
    assert changed.code == 2
    assert "model.hidden_dim: 32 -> 64" in changed.err
    assert sorted(place.losses("run-quick")) == [1, 2]


@pytest.mark.parametrize("dry", [(), ("--dry_run", "true")])
def test_a_mistake_in_a_target_touches_no_device(workplace, in_process, monkeypatch, dry):
    def opened(*_):
        raise AssertionError("a device was asked for")

    place = workplace(1)
    write_targets(place)
    monkeypatch.setattr("jax._src.xla_bridge.get_backend", opened)
    result = in_process(train.main, place, "--config_path", "run.yaml", "--target", "quik", *dry)
    assert result.code == 2
    assert "--target: 'quik' is not a target. Did you mean 'quick'?" in result.err
