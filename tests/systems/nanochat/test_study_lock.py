"""The lock of a scaling study's folder, where the file system has none."""

import errno

import pytest

from jaxlm.systems.nanochat.commands import scaling
from tests.engine.checkpoint.test_lease import check_failing_lock, check_lost_lease, patient  # noqa: F401 - a fixture


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_lock_that_fails_is_not_passed(tmp_path, monkeypatch, number):
    check_failing_lock(tmp_path, monkeypatch, scaling._locked, number)


def test_a_study_learns_that_it_has_lost_its_lease(tmp_path, monkeypatch, patient):  # noqa: F811
    check_lost_lease(tmp_path, monkeypatch, scaling._locked)
