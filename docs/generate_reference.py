"""Writes docs/all-pages.md from the navigation in mkdocs.yml.

python docs/generate_reference.py
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
ALL_PAGES = DOCS / "all-pages.md"


def all_pages() -> str:
    """Every page of the navigation that is a file, by its title, in the navigation's groups."""
    nav = yaml.safe_load(_navigation())
    return "\n".join(["# All pages\n", *(line for part in nav[1:] for line in _group(part, 2))]).rstrip() + "\n"


def _navigation() -> str:
    """The list `nav` of mkdocs.yml, which is its last key."""
    return (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def _group(part: dict[str, Any], level: int) -> Iterator[str]:
    ((name, entries),) = part.items()
    yield f"{'#' * level} {name}\n"
    written = (page for entry in entries for page in entry.values() if isinstance(page, str) and page != ALL_PAGES.name)
    pages = [page for page in written if (DOCS / page).exists()]
    if pages:
        yield from (f"* [{_title(page)}]({page})" for page in pages)
        yield ""
    for entry in entries:
        if isinstance(next(iter(entry.values())), list):
            yield from _group(entry, level + 1)


def _title(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


if __name__ == "__main__":
    ALL_PAGES.write_text(all_pages(), encoding="utf-8")
