"""A folder in nanochat's form."""

import pytest

from tests.session.test_hf_folder import check_folder, folder, original  # noqa: F401 - fixtures


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_opened(folder, monkeypatch, capsys):  # noqa: F811
    check_folder(["to-nanochat"], folder, monkeypatch, capsys)
