"""The page `reference/modules.md`: the first line of each module. MkDocs calls `on_files` below (`make docs`)."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "jaxlm"


def on_files(files: Any, config: Mapping[str, Any]) -> Any:
    """Adds the page (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/modules.md", content=modules()))
    return files


def modules() -> str:
    """The whole page."""
    return "\n".join(["# Modules\n", *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    folders = sorted({path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py"})
    for folder in folders:
        yield f"## `{folder.relative_to(SOURCE.parent).as_posix()}/`\n"
        yield "| module | what it holds |\n|---|---|"
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                yield f"| `{path.name}` | {_first_paragraph(path)} |"
        yield ""


def _first_paragraph(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")
