"""Commands with a model that fills in masks."""

import io
import json
import re
import shutil

import pytest

from jaxlm.commands import chat, sample
from tests.session.test_chat import (
    check_no_tokens,
    folder,  # noqa: F401 - a fixture
)


@pytest.fixture
def fills_in(folder, tmp_path):  # noqa: F811
    """The same model, but its tokens attend to later ones."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    return tmp_path


@pytest.mark.slow
def test_a_chat_with_a_model_that_fills_in_masks_is_refused_at_the_start(fills_in, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert chat.main(["--checkpoint", str(fills_in)]) == 2
    refused = capsys.readouterr().err
    assert re.search(r"--checkpoint: .* has model\.use_bidirectional_attention: true, so .* `jaxlm sample`", refused)


@pytest.mark.slow
@pytest.mark.parametrize("count", ["-1", "0"])
def test_a_sample_without_tokens_is_refused(fills_in, monkeypatch, capsys, count):
    check_no_tokens(fills_in, monkeypatch, capsys, sample, count)
