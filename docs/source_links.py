"""Links from pages to the code: ``[`name`](../../src/jaxlm/file.py)``, where `name` is a class or function of the file.

In a checkout, such a link opens the file. For the site, MkDocs calls the two hooks below: each linked file becomes a page
with the linked code. Links have no line numbers, which every edit of the code would make wrong.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[`(?P<name>[\w.]+)(?P<rest>[^`]*)`\]\((?P<up>(?:\.\./)+)(?P<file>src/jaxlm/[\w/]+\.py)\)")


def definitions(file: str) -> dict[str, tuple[int, int]]:
    """First and last line of each class and function of a file by its qualified name (`Mixture.read`, `train_step`)."""
    found: dict[str, tuple[int, int]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(prefix + node.name, (node.lineno, node.end_lineno or node.lineno))
                # Definitions inside a function are listed under their own name.
                walk(node.body, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else "")

    walk(ast.parse((ROOT / file).read_text(encoding="utf-8")).body, "")
    return found


def on_files(files: Any, config: Mapping[str, Any]) -> Any:
    """Adds a page for each linked file (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    linked: dict[str, set[str]] = {}
    for page in files.documentation_pages():
        for match in LINK.finditer(page.content_string):
            linked.setdefault(match["file"], set()).add(match["name"])
    for file, names in linked.items():
        files.append(File.generated(config, _page(file), content=_code(file, names)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links at the pages of the linked files (a hook of MkDocs)."""
    return LINK.sub(
        lambda m: f"[`{m['name']}{m['rest']}`]({m['up'][3:]}{_page(m['file'])}#{_anchor(m['name'])})", markdown
    )


def _page(file: str) -> str:
    return f"source/{file.removeprefix('src/jaxlm/').removesuffix('.py').replace('/', '-')}.md"


def _anchor(name: str) -> str:
    return (
        name.lower().replace(".", "-").replace("__", "")
    )  # Markdown would print `__next__` in bold, and lose the anchor


def _code(file: str, names: set[str]) -> str:
    lines, where = (ROOT / file).read_text(encoding="utf-8").splitlines(), definitions(file)
    parts = [f"# {file}"]
    for name in sorted(names, key=where.__getitem__):
        first, last = where[name]
        code = "\n".join(lines[first - 1 : last])
        parts.append(f'## `{name}` {{#{_anchor(name)}}}\n\n````{{ .python linenums="{first}" }}\n{code}\n````')
    return "\n\n".join(parts) + "\n"
