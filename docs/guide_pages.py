"""The pages of the guide, made from the configuration's dataclasses: one per part of the configuration, and `keys.md`, the
alphabetical index of all keys.

MkDocs calls `on_files` below (`make docs`). Only `docs/guide/index.md` is written by hand. Examples come from
docs/examples.yaml.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.schema import ConfigKey, ConfigSection, sections

EXAMPLES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "examples.yaml").read_text("utf-8"))
# Page -> its title and the path of its first section. A section is on the page with the longest matching path.
_PAGES = {
    "run": ("Top-level keys", ""),
    "data": ("Data", "data"),
    "model": ("Model", "model"),
    "trainer": ("Trainer", "trainer"),
    "checkpointer": ("Checkpointer", "trainer.checkpointer"),
    "tracker": ("Trackers", "trainer.tracker"),
    "distributed": ("Distributed and Ray", "trainer.distributed"),
    "optimizer": ("Optimizer and learning rate", "optimizer"),
    "objective": ("Objective", "objective"),
    "refs": ("References", "refs"),
    "evals": ("Evaluations", "evals"),
    "tables": ("Tables", "tables"),
    "phases": ("Phases and surgery", "phases"),
}
_NOTE = (
    "Each entry is a key, its type, its default, what it does, and an example unless a number says enough."
    " See also [how the YAML is read](index.md) and the [index of all keys](keys.md)."
)
_NUMBERS = {"int", "float", "bool", "null"}
_ELSEWHERE = {"trainer.ray": "distributed"}


@dataclass(frozen=True)
class _Entry:
    """A key as the guide shows it: once for all types of a section in which it has the same meaning.

    Attributes:
        path: the dotted path of the section.
        anchor: unique in the guide.
        defaults: type -> default; the type is None for a key that the section has with every type.
    """

    path: str
    key: ConfigKey
    example: str | None
    anchor: str = ""
    defaults: dict[str | None, str | None] = field(default_factory=dict)

    @property
    def only_type(self) -> str | None:
        """The one type that has this key, or None if several types or the section itself have it."""
        return next(iter(self.defaults)) if len(self.defaults) == 1 else None

    def default(self) -> str:
        """The default in words; one per type where they differ."""
        by_value: dict[str | None, list[str]] = defaultdict(list)
        for choice, value in self.defaults.items():
            by_value[value].append(f"`{choice}`")
        if len(by_value) == 1:
            return _default(next(iter(by_value)))
        common, *others = sorted(by_value.items(), key=lambda item: -len(item[1]))
        return "; ".join([_default(common[0]), *(f"{_default(v)} for {', '.join(names)}" for v, names in others)])


def on_files(files: Any, config: Mapping[str, Any]) -> Any:
    """Adds the pages (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, f"guide/{name}", content=content))
    return files


def pages() -> dict[str, str]:
    """File name -> content of every generated page of the guide."""
    by_path: dict[str, list[ConfigSection]] = defaultdict(list)
    for section in sections(RunConfig):
        by_path[section.path].append(section)
    written = {}
    entries: list[tuple[str, _Entry]] = []
    for page, (title, _) in _PAGES.items():
        parts = [f"# {title}", _NOTE]
        for path, group in by_path.items():
            if _page_of(path) == page:
                group_entries = list(_entries(group))
                entries += [(page, entry) for entry in group_entries]
                parts += _section(path, group, group_entries)
        written[f"{page}.md"] = "\n\n".join(parts) + "\n"
    written["keys.md"] = _index(entries)
    return written


def _page_of(path: str) -> str:
    if path in _ELSEWHERE:
        return _ELSEWHERE[path]
    return max((len(begin), page) for page, (_, begin) in _PAGES.items() if f"{path}.".startswith(begin))[1]


def _entries(group: Sequence[ConfigSection]) -> Iterator[_Entry]:
    """The keys of a section and of its types, each key once per meaning."""
    merged: dict[tuple[str, ...], _Entry] = {}
    for section in group:
        for key in section.keys:
            identity = (key.name, key.type, key.meaning, "type" if section.choice else "section")
            entry = merged.setdefault(identity, _Entry(section.path, key, example(section, key)))
            entry.defaults[section.choice] = key.default
    anchors: set[str] = set()
    for entry in merged.values():
        path = [entry.path, entry.key.name] if entry.path else [entry.key.name]
        anchor = ".".join(path)
        if entry.only_type or anchor in anchors:
            anchor = ".".join([path[0], str(next(iter(entry.defaults))), path[-1]])
        anchors.add(anchor)
        yield replace(entry, anchor=anchor)


def _section(path: str, group: Sequence[ConfigSection], entries: Sequence[_Entry]) -> Iterator[str]:
    outer = group[0]
    if path:
        yield f"## `{path}`"
        absent = "" if outer.is_default else " This section is absent unless you write it."
        yield _sentence(outer.meaning) + absent
    yield from _listed([entry for entry in entries if None in entry.defaults])
    yield from _rules(outer)
    choices = [section for section in group if section.choice is not None]
    if not choices:
        return
    shared = [entry for entry in entries if len(entry.defaults) > 1]
    if shared:
        yield f"### `{path}`: keys of several types"
        yield from _listed(shared, types=[section.choice for section in choices])
    for section in choices:
        default = " (the default)" if section.is_default else ""
        yield f"### `type: {section.choice}`{default}"
        yield from _listed([entry for entry in entries if list(entry.defaults) == [section.choice]])
        yield from _rules(section)
        common = [f"[`{e.key.name}`](#{e.anchor})" for e in shared if section.choice in e.defaults]
        if common:
            yield f"Keys above: {', '.join(common)}."
        elif not section.keys:
            yield "No keys of its own."


def _rules(section: ConfigSection) -> Iterator[str]:
    if section.rules:
        yield "\n".join(["Rules:", "", *(f"* `{rule.text}`" for rule in section.rules)])


def _listed(entries: Sequence[_Entry], types: Sequence[str | None] = ()) -> Iterator[str]:
    lines = []
    for entry in entries:
        which = f" {_types_of(entry, types)}" if types else ""
        shown = "" if entry.example is None else f"<br>Example: `{entry.key.name}: {entry.example}`"
        lines.append(
            f'* <a id="{entry.anchor}"></a>**`{entry.key.name}`** · {entry.key.type} · {_described_default(entry)}<br>'
            f"{_sentence(entry.key.meaning)}{which}{shown}"
        )
    if lines:
        yield "\n".join(lines)


def _types_of(entry: _Entry, types: Sequence[str | None]) -> str:
    missing = [f"`{choice}`" for choice in types if choice not in entry.defaults]
    if not missing:
        return "All types."
    if len(missing) < len(entry.defaults):
        return f"All types except {', '.join(missing)}."
    return f"Types: {', '.join(f'`{choice}`' for choice in entry.defaults)}."


def _described_default(entry: _Entry) -> str:
    default = entry.default()
    return default if default in ("required", _OWN_KEYS) else f"default {default}"


def _index(entries: Sequence[tuple[str, _Entry]]) -> str:
    rows: dict[str, list[str]] = defaultdict(list)
    for page, entry in sorted(entries, key=lambda item: (item[1].key.name.lower(), item[1].path, item[1].anchor)):
        types = [f"`{choice}`" for choice in entry.defaults if choice is not None]
        only = f" ({', '.join(types)})" if 0 < len(types) <= 4 else ""
        where = f"`{entry.path}`{only}" if entry.path else "top level"
        link = f"[`{entry.key.name}`]({page}.md#{entry.anchor})"
        rows[entry.key.name[0].upper()].append(f"| {link} | {where} | {entry.default()} |")
    parts = [
        "# Index of keys",
        "Every key of the YAML in alphabetical order, with its section (and the `type:` it belongs to) and its default.",
    ]
    for letter, lines in rows.items():
        parts += [f"## {letter}", "\n".join(["| key | section | default |", "|---|---|---|", *lines])]
    return "\n\n".join(parts) + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def example(section: ConfigSection, key: ConfigKey) -> str | None:
    """A value that the key may have, as YAML on one line; None for an optional number, whose type and default say enough, and
    for a key without effect in this section (`unused`).

    Raises:
        KeyError: docs/examples.yaml has none, and the key needs one.
    """
    if any(key.name in rule.keys and ": no effect, because" in rule.text for rule in section.rules):
        return None
    if key.type == "bool":
        return "true" if key.default == "false" else "false"
    if _NUMBERS.issuperset(re.sub(r" \(.*?\)", "", key.type).split(" or ")) and key.default != "required":
        return None
    of_type = EXAMPLES.get(f"{section.path}:{section.choice}", {})
    if key.name in of_type:
        return _as_yaml(of_type[key.name])
    places = section.path.split(".")
    for depth in range(len(places), 0, -1):
        examples = EXAMPLES.get(".".join(places[:depth]), {})
        if key.name in examples:
            return _as_yaml(examples[key.name])
    raise KeyError(f"docs/examples.yaml: no example of '{key.name}' under '{section.path}'")


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


_OWN_KEYS = "keys of its own"


def _default(text: str | None) -> str:
    return _OWN_KEYS if text is None else text if text == "required" else f"`{text}`"
