"""Writes the tables of docs/guide.md from the configuration's dataclasses: `python docs/generate_guide.py`.

What stands above the first table is written by hand, and stays. The examples are those of docs/examples.yaml.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxlm.config.key_index import FILE, keys_json
from jaxlm.config.run import RunConfig
from jaxlm.config.schema import ConfigKey, ConfigSection, sections

GUIDE = Path(__file__).parent / "guide.md"
FIRST = "## Top level\n"
EXAMPLES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "examples.yaml").read_text("utf-8"))


def guide() -> str:
    """The whole document, with its tables made anew."""
    introduction = GUIDE.read_text(encoding="utf-8").partition(FIRST)[0]
    return introduction + FIRST + "\n" + "\n".join("\n".join(part) for part in _parts()) + "\n"


def _parts() -> Iterator[list[str]]:
    for section in sections(RunConfig):
        heading = _heading(section)
        table = [
            f"| `{key.name}` | {key.type} | {_default(key.default)} | `{example(section, key)}` |"
            f" {key.meaning.replace('|', chr(92) + '|')} |"
            for key in section.keys
        ]
        if table:
            table = ["| key | type | default | example | meaning |", "|---|---|---|---|---|", *table, ""]
        elif section.choice is not None:
            table = ["No keys of its own.", ""]
        yield heading + table


def _heading(section: ConfigSection) -> list[str]:
    if section.choice is not None:
        return [f"With `type: {section.choice}`:", ""]
    if not section.path:
        return []
    level = "##" if "." not in section.path.replace(".N", "") else "###"
    absent = "" if section.is_default else " It is not there unless it is written."
    return [f"{level} `{section.path}`", "", section.meaning[:1].upper() + section.meaning[1:] + absent, ""]


def example(section: ConfigSection, key: ConfigKey) -> str:
    """A value that the key may have, as YAML on one line. Raises `KeyError` where docs/examples.yaml says none."""
    places = section.path.split(".")
    for depth in range(len(places), 0, -1):
        found = EXAMPLES.get(".".join(places[:depth]), {})
        if key.name in found:
            return _written(found[key.name])
    if key.type == "bool":
        return "true" if key.default == "false" else "false"
    raise KeyError(f"docs/examples.yaml: no example of '{key.name}' under '{section.path}'")


def _written(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _default(text: str | None) -> str:
    return "its own table" if text is None else text if text == "required" else f"`{text}`"


if __name__ == "__main__":
    GUIDE.write_text(guide(), encoding="utf-8")
    FILE.write_text(keys_json(list(sections(RunConfig))), encoding="utf-8")
