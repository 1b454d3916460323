"""The model card of an exported folder: README.md, with the header in YAML that the Hugging Face Hub reads.

Source: huggingface.co/docs/hub/model-cards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from jaxlm.core.redaction import redacted

README = "README.md"
# Keys in the header of the base model's card that also hold for a model made from it.
_INHERITED = ("license", "license_name", "license_link", "language")
_FENCE = "---"


@dataclass(frozen=True)
class ModelCard:
    """Holds what a model card says.

    Attributes:
        title: name of the model.
        library: the library that loads the folder, `transformers` or `peft`.
        summary: what the model is, in a sentence or two.
        sections: heading -> rows of name and value. Empty sections are left out.
        base_model: the Hub name of the model that it was made from; None if there is none.
        datasets: Hub names of the datasets that it was trained on.
        of_base: README.md of the model that it was made from, which stays part of the card.
        task: what the Hub calls what the model does.
    """

    title: str
    library: str
    summary: str
    sections: Mapping[str, Sequence[tuple[str, str]]]
    base_model: str | None = None
    datasets: Sequence[str] = ()
    of_base: str | None = None
    task: str = "text-generation"

    def text(self) -> str:
        """The content of README.md, which others will read: without secrets."""
        inherited, of_base = _split(self.of_base or "")
        header = {key: inherited[key] for key in _INHERITED if _is_flat(inherited.get(key))}
        header |= {"library_name": self.library, "pipeline_tag": self.task}
        header |= {"base_model": self.base_model} if self.base_model else {}
        header |= {"datasets": list(self.datasets)} if self.datasets else {}
        parts = [f"---\n{yaml.safe_dump(header, sort_keys=False)}---", f"# {self.title}", self.summary]
        for heading, rows in self.sections.items():
            parts += [f"## {heading}", _table(rows)] if rows else []
        parts += ["## Card of the base model", of_base.strip()] if of_base.strip() else []
        return redacted("\n\n".join(parts) + "\n")


def _split(card: str) -> tuple[Mapping[str, Any], str]:
    """The header and the text below it. A header that is not a mapping in YAML stays part of the text."""
    first, *lines = card.split("\n")
    end = next((number for number, line in enumerate(lines) if line.rstrip() == _FENCE), None)
    if first.rstrip() != _FENCE or end is None:
        return {}, card
    try:
        # Only texts: what looks like a date, a number or `no` (Norwegian) is a text of the card's author.
        header = yaml.load("\n".join(lines[:end]), yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        header = None
    return (header, "\n".join(lines[end + 1 :])) if isinstance(header, dict) else ({}, card)


def _is_flat(value: object) -> bool:
    """Tells whether a value is a text or a list of texts, as all inherited keys are: nested ones could be too deep."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
