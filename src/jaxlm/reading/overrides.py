"""Command-line options: parsing, overriding the configuration by dotted path, and the help text."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.reading.schema import ConfigSection
from jaxlm.reading.yaml import ConfigSource, KeyPath, merge, parse_value

_WIDTH = 118
_CONFIG_OPTIONS = ("config_path", "config")
_FILE_OPTIONS = ("target", "config_root")  # what to read of the file; their values are text
OPTION = "command line --"
_TEMPLATE = "chat_template"  # keys that end so hold a Jinja template
_ALL = "all"  # the topic of all keys
COMMON = (
    *("data.train_urls", "data.validation_urls", "data.tokenizer", "data.format", "model.seq_len", "model.hidden_dim"),
    *("model.num_layers", "trainer.num_train_steps", "trainer.train_batch_size", "trainer.per_device_parallelism"),
    *("trainer.steps_per_eval", "trainer.mp", "trainer.seed", "trainer.id", "trainer.log_dir", "trainer.tracker"),
    *("trainer.checkpointer.base_path", "optimizer.learning_rate", "optimizer.weight_decay", "optimizer.warmup"),
    *("initialize_from_hf", "use_hf_model_config", "epoch", "dry_run"),
)
_JINJA = re.compile(r"\{[{%#]")


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        config_path: path of the configuration file, if given.
        target: name of the target in the file to use, if given.
        config_root: folder that has all included files, if given.
        options: dotted path -> value, in the order given.
        help: TOPIC of `--help TOPIC`, "" without a topic; None without `--help`.
    """

    config_path: str | None = None
    target: str | None = None
    config_root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    help: str | None = None


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Parses `--config_path run.yaml --trainer.seed 1 --optimizer.learning_rate=3e-4`. Values are YAML, templates text."""
    for number, argument in enumerate(arguments):
        if argument in ("--help", "-h"):
            topic = arguments[number + 1] if number + 1 < len(arguments) else ""
            return Arguments(help="" if topic.startswith("-") else topic)
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--") or option == "--":
            raise _not_an_option(option, options)
        name, equals, text = option[2:].partition("=")
        if name not in (*_CONFIG_OPTIONS, *_FILE_OPTIONS) and difflib.get_close_matches(
            name, _CONFIG_OPTIONS, cutoff=0.8
        ):
            raise ConfigError(f"command line: --{name} is not an option. Did you mean --config_path?")
        if not equals:
            if not rest or re.match(r"--[A-Za-z_]", rest[0]):
                raise ConfigError(f"command line: --{name} needs a value (--{name} true, for a switch)")
            text = rest.pop(0)
        if name in options:
            raise ConfigError(f"command line: --{name} is given twice. Keep one of them")
        options[name] = text
    paths = [options.pop(name) for name in _CONFIG_OPTIONS if name in options]
    if len(paths) > 1:
        raise ConfigError("command line: --config_path and --config are aliases. Remove one of them")
    target, root = (options.pop(name, None) for name in _FILE_OPTIONS)
    return Arguments(
        next(iter(paths), None), target, root, {name: _parse(name, text) for name, text in options.items()}
    )


def _parse(name: str, text: str) -> Any:
    """The value of an option. A template is a text, although YAML finds mappings, comments or folded lines in it."""
    if name.rpartition(".")[2] != _TEMPLATE or text.startswith(("!include ", "include ")):
        return parse_value(text)
    if _JINJA.search(text) and not text.startswith(("'", '"')):
        return text
    try:
        value = parse_value(text)
    except ConfigError:
        return text
    return text if isinstance(value, (dict, list)) else value


def _not_an_option(argument: str, options: dict[str, str]) -> ConfigError:
    """The error for an argument without dashes. Args: options: those before it."""
    last = next(reversed(options), None)
    if last in _CONFIG_OPTIONS:
        hint = f"--{last} takes one file. To combine files, write `<<: !include {argument}` in it"
    elif argument.endswith((".yaml", ".yml")) and last is None:
        hint = f"To read a file, write --config_path {argument}"
    else:
        hint = "Write --section.key value" + (f". If it belongs to --{last}, quote the whole value" if last else "")
    return ConfigError(f"command line: '{argument}' is not an option. {hint}")


def override(source: ConfigSource, options: dict[str, Any], origin: str = OPTION) -> ConfigSource:
    """Applies the options to a configuration: sections are merged, lists replaced. `phases.1.name` indexes a list.

    Args:
        origin: what messages write before the name of an option.
    """
    tree, marks = source.tree, dict(source.marks)
    for name, value in options.items():
        path: KeyPath = tuple(name.split("."))
        tree = _set(tree, path, value, f"{origin}{name}")
        place = tuple(int(p) if str(p).isdecimal() else p for p in path)
        marks[place] = f"{origin}{name}"
        for size in range(1, len(place)):
            marks.setdefault(place[:size], f"{origin}{name}")  # a section that the file does not have
    return ConfigSource(tree, marks)


def option_tree(options: dict[str, Any], origin: str = OPTION) -> dict[str, Any]:
    """The options as a nested dictionary. Args: origin: as of `override`."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        tree = _set(tree, tuple(name.split(".")), value, f"{origin}{name}")
    return tree


def _set(node: Any, path: KeyPath, value: Any, option: str) -> Any:
    """Args: option: for messages."""
    if not path:
        return merge(node, value) if isinstance(node, dict) and isinstance(value, dict) else value
    key, rest = path[0], path[1:]
    if node is None:
        node = {}
    if isinstance(node, dict):
        return {**node, key: _set(node.get(key), rest, value, option)}
    if isinstance(node, list):
        if not str(key).isdecimal() or int(key) >= len(node):
            raise ConfigError(f"{option}: '{key}' is not an index of a list of length {len(node)}")
        return [_set(item, rest, value, option) if i == int(key) else item for i, item in enumerate(node)]
    raise ConfigError(f"{option}: {node!r} is neither a section nor a list, so it has no '{key}'")


def help_text(sections: Iterable[ConfigSection], command: str, topic: str = "") -> str:
    """The keys of a configuration with their types, defaults and meanings.

    Args:
        command: the command to show in the usage line, such as `jaxlm train`.
        topic: the only section (`optimizer`, `trainer.checkpointer`) or key (`trainer.seed`) to show; `all` shows all, and ""
            the sections and the keys that most runs set.
    """
    usage = (
        f"usage: {command} [--config_path FILE] [--target NAME] [--section.key VALUE ...] [--help [SECTION | all]]\n"
    )
    if not topic:
        return "\n".join([usage, *_overview(list(sections), command)])
    selected = list(_on_topic(sections, "" if topic == _ALL else topic))
    if not selected:
        raise ConfigError(
            f"--help: there is no section or key '{topic}'. Choose one, such as optimizer, trainer.checkpointer or"
            " trainer.seed; `--help` alone lists the sections"
        )
    keys = "Keys of the YAML file, which are also command-line options (values are YAML):"
    return "\n".join([usage, keys, *(line for section in selected for line in _describe(section))])


def _overview(sections: Sequence[ConfigSection], command: str) -> Iterator[str]:
    yield "Sections of the YAML file:"
    for section in sections:
        name = section.path.removesuffix(".N").removesuffix(".NAME")
        if name and "." not in name and section.choice is None:
            yield _row(name, section.meaning)
    yield "\nKeys that most runs set, which are also command-line options (values are YAML):"
    keys = {f"{section.path}.{key.name}".lstrip("."): key for section in reversed(sections) for key in section.keys}
    for name in (name for name in COMMON if name in keys):
        yield _row(f"--{name}", keys[name].meaning)
    yield f"\n`{command} --help optimizer` describes a section, `--help trainer.seed` a key, `--help {_ALL}` everything."


def _row(name: str, meaning: str) -> str:
    sentence = re.split(r"(?<=\.)\s", meaning)[0].rstrip(".")
    return textwrap.fill(sentence, _WIDTH, initial_indent=f"  {name:34} ", subsequent_indent=" " * 37)


def _on_topic(sections: Iterable[ConfigSection], topic: str) -> Iterator[ConfigSection]:
    parent, _, name = topic.rpartition(".")
    for section in sections:
        if not topic or section.path == topic or section.path.startswith(f"{topic}."):
            yield section
        elif section.path == parent and (keys := tuple(key for key in section.keys if key.name == name)):
            yield replace(section, keys=keys, rules=tuple(rule for rule in section.rules if name in rule.keys))


def _describe(section: ConfigSection) -> Iterator[str]:
    if section.choice is not None:
        yield f"\n {section.path}.type: {section.choice}{' (the default)' if section.is_default else ''}"
    elif section.path:
        yield f"\n{section.path}: {section.meaning}"
    prefix = f"{section.path}." if section.path else ""
    for key in section.keys:
        if key.default is not None:
            yield f"  --{prefix}{key.name}  ({key.type}, {key.default})"
            yield textwrap.fill(key.meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    for rule in section.rules:
        yield textwrap.fill(f"  rule: {rule.text}", _WIDTH, subsequent_indent=" " * 6)
