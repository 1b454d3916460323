"""Starts from a checkpoint whose layers are cut into stacks."""

import pytest

from tests.session.test_init_from import check_renamed, trainings  # noqa: F401 - a fixture


@pytest.mark.soak
def test_a_checkpoint_whose_surgeries_renamed_its_weights_is_refused_with_a_way_that_works(
    trainings,  # noqa: F811
    monkeypatch,
    capsys,
):
    check_renamed(trainings, "split_at", [{"type": "split_at", "layer": 1}], monkeypatch, capsys)
