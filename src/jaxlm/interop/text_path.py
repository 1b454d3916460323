"""Where another program's file says that text or token ids are."""

import re

from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

TOKENS = ".npy"
_HUB = "hf://"
_HUB_NAME = re.compile(r"([^/@\s]+/)?[^/@\s]+(@\S+)?")
_TEXT = (".txt", ".jsonl", ".json", ".parquet")


def hub_name(path: str) -> str:
    """A model or dataset as jaxlm names it: `hf://org/name@revision` without its scheme, a path as it is."""
    return path.removeprefix(_HUB)


def put_text(path: str, section: Section, key: str, out: Translated) -> None:
    """Writes the source that a path means. Args: key: of the section, that has the path.

    Raises:
        ConfigError: jaxlm cannot read such files.
    """
    if path.startswith(_HUB):
        if not _HUB_NAME.fullmatch(hub_name(path)):
            raise section.error(key, f"'{path}' given, {_HUB}ORG/NAME expected")
        out.put("data.id", hub_name(path), section, key)
        return
    if not path.endswith((TOKENS, *_TEXT)):
        raise section.error(
            key,
            f"'{path}' given, which jaxlm cannot read: token ids in {TOKENS}, text in {', '.join(_TEXT)}, or a dataset"
            f" {_HUB}ORG/NAME expected",
        )
    out.put("data.train_urls", [path], section, key)
    if path.endswith(TOKENS):
        out.put("data.format", {"type": "pretokenized"}, section, key)
