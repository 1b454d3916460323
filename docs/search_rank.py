"""How high the site's search ranks a page: help first, then records of what was measured and decided.

MkDocs calls the hook below. A page whose header says otherwise is left alone.
"""

from typing import Any

_BOOST = {
    "start/": 4.0,
    "howto/": 2.0,
    "benchmarks.md": 0.2,
    "log.md": 0.1,
    "design/": 0.1,
    "reference/modules.md": 0.1,
    "reference/walk.md": 0.3,
    "all-pages.md": None,
    "source/": None,
}  # None: not found at all


def search(path: str) -> dict[str, Any]:
    """What a page's metadata say to the search, by its path below docs/."""
    boost = next((boost for begin, boost in _BOOST.items() if path.startswith(begin)), 1.0)
    return {"exclude": True} if boost is None else {"boost": boost}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Ranks the page (a hook of MkDocs)."""
    page.meta.setdefault("search", search(page.file.src_uri))
    return markdown
