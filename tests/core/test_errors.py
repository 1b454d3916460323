"""Messages stay short, whatever value somebody gives."""

import contextlib
import json
import re
from pathlib import Path

import pytest

import jaxlm
from jaxlm import train
from jaxlm.commands import bench, convert, prepare, report, sample
from jaxlm.core.errors import ConfigError, bounded, counted, listed
from jaxlm.data.sources.document_files import read_documents

LONG = "A" * 200_000


def test_a_message_keeps_its_beginning_and_its_end():
    message = f"data.tokenizer: '{LONG}' given. Set it to a folder"
    shown = str(ConfigError(message))
    assert shown == bounded(shown) == bounded(message)
    assert len(shown) < 2000
    assert shown.startswith("data.tokenizer: 'AAAA")
    assert "characters left out" in shown
    assert shown.endswith("' given. Set it to a folder")
    lines = "\n".join(["short", LONG, *map(str, range(30_000))])
    assert len(bounded(lines)) < 5000
    assert bounded(lines).endswith("29,952 more lines")
    assert bounded("a usual message\nof two lines") == "a usual message\nof two lines"


def test_a_long_list_of_names_says_how_many_there_are():
    assert listed(["a", "b"]) == "a, b"
    assert listed({}) == "none"
    names = {f"k{number}": None for number in range(30_000)}
    assert listed(names) == f"{', '.join(list(names)[:20])}, ... (29,980 more)"


def test_a_record_with_thousands_of_keys_is_described_by_a_few(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({f"key{number}": 1 for number in range(30_000)}) + "\n")
    with pytest.raises(ConfigError, match=r"Keys of the record: key0, .* key19, \.\.\. \(29,980 more\)\. "):
        next(iter(read_documents(path, "text")))


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (train.main, ["--model.type", LONG]),
        (train.main, ["--trainer.seed", LONG]),
        (train.main, ["--trainer.id", f"{LONG}/"]),
        (train.main, ["--trainer.mp", LONG]),
        (train.main, [f"--{LONG}", "1"]),
        (train.main, [f"--trainer.{LONG}", "1"]),
        (train.main, [f"--trainer.seed.{LONG}", "1"]),
        (train.main, ["--trainer", json.dumps(dict.fromkeys(map(str, range(3000)), 1))]),
        (train.main, ["--data.train_urls", f"[{LONG}"]),
        (train.main, ["--data.tokenizer", LONG, "--data.train_urls", "[stdlib:train]"]),
        (train.main, ["--config_path", "/".join([LONG] * 2)]),
        (sample.main, ["--checkpoint", LONG]),
        (sample.main, ["--checkpoint", "x", "--top_k", LONG]),
        (sample.main, ["--checkpoint", "x", f"--{LONG}"]),
        (bench.main, ["--steps", LONG]),
        (prepare.main, ["--show_batch", LONG]),
        (convert.main, [LONG]),
        (report.main, [LONG]),
        (report.main, ["x", "--price_per_hour", LONG]),
        (report.main, [f"s3x://{LONG}"]),
    ],
)
def test_no_argument_makes_a_long_message(tmp_path, monkeypatch, capsys, main, arguments):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # raised by argparse
        assert main(arguments) == 2
    said = capsys.readouterr()
    assert 0 < len(said.err) < 5000
    assert len(said.out) < 5000
    assert "Traceback" not in said.err


def test_a_number_has_its_noun():
    assert [counted(n, "step") for n in (0, 1, 2, 1_000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]


def test_no_message_has_a_noun_with_a_plural_in_parentheses():
    sources = Path(jaxlm.__file__).parent.rglob("*.py")
    text = re.compile(r"\} \w+\(e?s\)")  # `{n} file(s)`
    assert not [f"{file.name}: {found[0]}" for file in sources if (found := text.search(file.read_text()))]
