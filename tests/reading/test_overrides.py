"""The command line: parsing, overriding the file's keys, the help text."""

import re
from dataclasses import dataclass, field

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.overrides import COMMON, help_text, option_tree, override, parse_arguments
from jaxlm.reading.schema import sections
from jaxlm.reading.yaml import ConfigSource


def test_parses_a_command_line():
    parsed = parse_arguments(
        ["--config_path", "a.yaml", "--x.y", "3", "--x.z=4e-3", "--tracker", "[]", "--w", "-1", "--name=a=b"]
    )
    assert parsed.config_path == "a.yaml"
    assert parsed.options == {"x.y": 3, "x.z": 4e-3, "tracker": [], "w": -1, "name": "a=b"}
    assert not parsed.help


def test_values_are_yaml():
    options = parse_arguments(["--a", "null", "--b", "true", "--c", "{d: [1, two]}", "--e", "'3'"]).options
    assert options == {"a": None, "b": True, "c": {"d": [1, "two"]}, "e": "3"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run.yaml", "'run.yaml' is not an option. To read a file, write --config_path run.yaml"),
        ("-x 3", "'-x' is not an option. Write --section.key value"),
        ("--", "'--' is not an option"),
        ("--dry_run", "--dry_run needs a value"),
        ("--dry_run --x 3", "--dry_run needs a value"),
        ("--x 1 --x 2", "--x is given twice. Keep one of them"),
        ("--config a --config_path b", "are aliases. Remove one of them"),
        ("--configs a b", "--configs is not an option. Did you mean --config_path?"),
        ("--config_path a.yaml b.yaml", "--config_path takes one file. To combine files, write `<<: !include b.yaml`"),
        (
            "--data include x.yaml",
            "'x.yaml' is not an option. Write --section.key value. If it belongs to --data, quote",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(arguments.split())
    assert message in str(caught.value)


TEMPLATES = [
    "{{ bos_token }}{{ messages[0]['content'] }}",
    "{% for m in messages %}\n{{ m.role }}: {{ m.content }} # end\n{% endfor %}",
    "[{% for m in messages %}{{ m.content }},{% endfor %}]",
    "User: {{ messages[0].content }}",
    "{# none: #}{{ messages[0].content }}",
    "[INST",
    "a: b",
    "[a, b]",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_is_a_text(template):
    key = "data.format.chat_template"
    assert parse_arguments([f"--{key}", template]).options == {key: template}
    assert parse_arguments([f"--{key}={template}"]).options == {key: template}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("null", None),
        ("chatml", "chatml"),
        ("own.jinja", "own.jinja"),
        ("'{{ a }}'", "{{ a }}"),
        ('"{{ a }}\\n"', "{{ a }}\n"),
    ],
)
def test_names_null_and_quoted_chat_templates_are_yaml(given, expected):
    assert parse_arguments(["--data.format.chat_template", given]).options == {"data.format.chat_template": expected}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_takes_precedence_over_all_other_arguments(flag):
    assert parse_arguments(["--nonsense", flag, "more"]).help


def test_overrides_merge_sections_and_replace_lists():
    source = ConfigSource({"a": {"b": 1, "c": 2}, "many": [{"n": 1}, {"n": 2}]})
    after = override(source, {"a": {"c": 3}, "many.1.n": 5, "new.deep.key": 7}).tree
    assert after == {"a": {"b": 1, "c": 3}, "many": [{"n": 1}, {"n": 5}], "new": {"deep": {"key": 7}}}
    assert override(source, {"many": []}).tree["many"] == []
    assert source.tree == {"a": {"b": 1, "c": 2}, "many": [{"n": 1}, {"n": 2}]}  # the file's own tree is unchanged


def test_an_override_records_its_origin():
    assert override(ConfigSource({"many": [1]}), {"many.0": 2}).marks[("many", 0)] == "command line --many.0"


def test_a_section_that_only_an_option_has_is_not_looked_for_in_the_file():
    source = override(ConfigSource({"a": {}}, {(): "run.yaml:1", ("a",): "run.yaml:1"}), {"b.c.d": 1, "a.e": 2})
    assert [source.where(path) for path in (("b",), ("b", "c"), ("a",))] == ["command line --b.c.d"] * 2 + [
        "run.yaml:1"
    ]


@pytest.mark.parametrize("name", ["many.2", "many.x", "scalar.inside"])
def test_overrides_of_invalid_paths_are_refused(name):
    with pytest.raises(ConfigError, match=f"--{name}"):
        override(ConfigSource({"many": [1, 2], "scalar": 3}), {name: 1})


def test_options_without_a_config_file():
    assert option_tree({"a.b": 1, "a.c": 2}) == {"a": {"b": 1, "c": 2}}


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        first, second: two numbers of one meaning.
        third: spread over
            two lines.
    """

    first: int
    second: int = 2
    third: str | None = None


@dataclass(frozen=True)
class Whole:
    """A whole.

    Attributes:
        part: the only one.
    """

    part: Part = field(default_factory=lambda: Part(7))


def test_help_shows_type_default_and_meaning_of_every_key():
    text = help_text(list(sections(Whole)), "python -m jaxlm.some", "all")
    assert "usage: python -m jaxlm.some" in text
    assert "part: the only one." in text
    assert "--part.first  (int, 7)\n      two numbers of one meaning." in text
    assert "--part.third  (str or null, null)\n      spread over two lines." in text


def test_help_without_a_topic_lists_sections_and_common_keys():
    listed = list(sections(RunConfig))
    text = help_text(listed, "jaxlm train")
    assert len(text.splitlines()) < 60
    assert all(re.search(rf"^  --{re.escape(name)} +\S", text, re.M) for name in COMMON), "each is a key"
    top = {key.name for key in listed[0].keys if "section" in key.type}
    assert top, "sections"
    assert all(re.search(rf"^  {name} +\S", text, re.M) for name in top)
    assert "--help all" in text
