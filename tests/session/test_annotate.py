"""Annotations of the sequences that the steps of a phase read: which ones are stored, where, and what they say."""

from types import SimpleNamespace

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.session import annotate


def test_annotations_that_do_not_fit_on_the_disk_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(annotate.shutil, "disk_usage", lambda path: SimpleNamespace(free=700))
    annotate._check_space(tmp_path / "train/annotations/x", 700)
    with pytest.raises(ConfigError, match=r"objective: what it stores of the training data in .* needs 0\.0 GB"):
        annotate._check_space(tmp_path / "train/annotations/x", 701)
