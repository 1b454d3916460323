import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.reading.yaml import load_yaml, parse_value, without_quotes


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / "run.yaml"


@pytest.mark.trap("D14")
def test_include_works_as_a_value_nested_and_at_the_top_level(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "inner.yaml").write_text("deep: 1\n")
    (tmp_path / "sub" / "data.yaml").write_text("urls: [a]\nmore: !include inner.yaml\n")
    run = write(
        tmp_path,
        run="<<: !include base.yaml\ndata: !include sub/data.yaml\ntrainer: {seed: 2}\n",
        base="trainer: {seed: 1, steps: 5}\nmodel: {type: llama}\n",
    )
    assert load_yaml(run).tree == {
        "trainer": {"seed": 2, "steps": 5},
        "model": {"type": "llama"},
        "data": {"urls": ["a"], "more": {"deep": 1}},
    }
    assert load_yaml(write(tmp_path, run="!include base.yaml\n")).tree["model"] == {"type": "llama"}


def test_marks_hold_file_and_line(tmp_path):
    source = load_yaml(write(tmp_path, run="data: !include d.yaml\ntrainer:\n  seed: 1\n", d="\nurls: 3\n"))
    assert source.where(("trainer", "seed")).endswith("run.yaml:3")
    assert source.where(("data", "urls")).endswith("d.yaml:2")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", ["run.yaml:4", "b.c", "line 3"]),
        ("a: !include nowhere.yaml\n", ["run.yaml:1", "nowhere.yaml"]),
        ("a: !include run.yaml\n", ["run.yaml:1", "circular", "run.yaml -> run.yaml"]),
        ("a: [1\n", ["run.yaml:1: while parsing a flow sequence: expected ',' or ']'"]),
        ("a:\n  b: [1\nc: 2\n", ["run.yaml:2: while parsing a flow sequence: expected ',' or ']'"]),
        ("a:\n  b: 'x\nc: 2\nd: 3\n", ["run.yaml:2: while scanning a quoted scalar"]),
        ("a:\n  b: 1\n c: 2\n", ["run.yaml:3: expected <block end>"]),
        ("a: 1\n%x\n\n", ["run.yaml:2: expected '<document start>'"]),
        ("a: 1\n---\nb: 2\n", ["run.yaml:2: expected a single document in the stream, but found another document"]),
        ("a: 1\nb: \x07\n", ["run.yaml:2: the character '\\x07' is not allowed"]),
        ("", ["run.yaml", "empty"]),
        ("- 1\n", ["run.yaml", "list", "mapping"]),
        ("<<: 3\n", ["run.yaml:1", "mapping"]),
    ],
)
def test_yaml_errors_name_file_and_line(tmp_path, text, parts):
    with pytest.raises(ConfigError) as error:
        load_yaml(write(tmp_path, run=text))
    for part in parts:
        assert part in str(error.value)


def test_the_error_for_a_missing_file_shows_the_path(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_yaml(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6E-4", 6e-4),
        ("1e3", 1000.0),
        ("1_024", 1024),
        ("512.0", 512.0),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("[a, 1]", ["a", 1]),
        ("1:30:00", "1:30:00"),
        ("0x10", "0x10"),
        ("010", 10),
        ("2026-01-01", "2026-01-01"),
        ("", None),
    ],
)
def test_scalars(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


HOSTILE = {
    "syntax": ("a: [1\n", r"run\.yaml:1"),
    "control character": ("a: \x07\n", r"run\.yaml:1: "),
    "not a date": ("a: !!timestamp 2026-13-45\n", r"run\.yaml:1: '2026-13-45' is not a valid timestamp"),
    "not an integer": ("a: !!int foo\n", r"run\.yaml:1: 'foo' is not a valid int"),
    "an integer of 5,000 digits": ("a: " + "9" * 5000 + "\n", r"run\.yaml:1: '999.*' is not a valid int"),
    "a Python object": (
        "a: !!python/object/apply:os.system [ls]\n",
        r"run\.yaml:1: the tag '.*os.system' is not supported",
    ),
    "deep": ("a: " + "[" * 1000, r"run\.yaml: nested too deeply"),
    "contains itself": ("a: &x [*x]\n", r"run\.yaml: nested too deeply, or contains itself"),
    "a path with NUL": ('a: !include "x\\0y"\n', r"a path cannot contain a NUL character"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_message(tmp_path, name):
    text, message = HOSTILE[name]
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_yaml(tmp_path / "run.yaml")
    assert len(str(caught.value)) < 1000


def test_aliases_that_multiply_are_counted_and_not_expanded(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]  # 10 ** 12 values
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+: more than 100000 values"):
        load_yaml(tmp_path / "run.yaml")


def test_a_long_chain_of_includes_is_one_message(tmp_path):
    for number in range(400):
        (tmp_path / f"{number}.yaml").write_text(f"a: !include {number + 1}.yaml\n")
    (tmp_path / "400.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_yaml(tmp_path / "0.yaml")


@pytest.mark.parametrize("text", ["include data.yaml", "!include data.yaml"])
def test_a_file_is_included_on_the_command_line(tmp_path, monkeypatch, text):
    """The first spelling is Draccus's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.yaml").write_text("train_urls: [a.txt]\n")
    assert parse_value(text) == {"train_urls": ["a.txt"]}
    (tmp_path / "data.yaml").unlink()
    with pytest.raises(ConfigError, match=r"!include \S+data\.yaml: cannot be read \(No such file"):
        parse_value(text)
    assert parse_value(f"'{text}'") == text


@pytest.mark.parametrize("text", ["6E-4", "-1", "1_024", ".5", "true", "null", "x", "1:30", "2026-01-01", ""])
def test_a_text_without_quotes_is_what_yaml_reads(text):
    assert repr(without_quotes(text)) == repr(parse_value(text) if text else None)
