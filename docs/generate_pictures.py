"""Draws the pictures of docs/concepts.md: `python docs/generate_pictures.py`.

They are 560 wide, so that their text can be read on a phone. Ink is dark on light pages and light on dark ones; fills are
nearly transparent.
"""

from pathlib import Path
from xml.sax.saxutils import escape

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 560
FILLS = {"plain": "none", "state": "#4c8dff", "step": "#2fa84f", "disk": "#d9822b"}
_STYLE = ":root{color:#30363d}@media(prefers-color-scheme:dark){:root{color:#c9d1d9}}"
_LINE = 18


def box(x: int, y: int, width: int, height: int, lines: list[str], kind: str = "plain") -> str:
    """A rounded box with lines of text in its middle, the first of them bold."""
    fill = f'fill="{FILLS[kind]}" fill-opacity="0.18" stroke="currentColor" stroke-opacity="0.6"'
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" {fill}/>'
    top = y + height / 2 - _LINE / 2 * (len(lines) - 1) + 5
    return shape + "".join(
        text(x + width / 2, top + _LINE * number, line, bold=number == 0) for number, line in enumerate(lines)
    )


def text(x: float, y: float, line: str, *, bold: bool = False, anchor: str = "middle") -> str:
    """One line."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(line)}</text>'


def arrow(*points: tuple[int, int], label: str = "", at: tuple[int, int] | None = None, anchor: str = "middle") -> str:
    """A line with a head at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.5" marker-end="url(#head)"/>'
    return line + (text(*at, label, anchor=anchor) if at else "")


def picture(title: str, height: int, parts: list[str]) -> str:
    """A whole SVG file."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        f' role="img" aria-label="{title}" font-family="sans-serif" font-size="14" fill="currentColor">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n<defs>{head}</defs>\n{body}\n</svg>\n"
    )


def run() -> str:
    """A run: what happens before, in and between the steps of a phase."""
    parts = [
        box(30, 12, 150, 56, ["plan", "YAML, checked"]),
        box(210, 12, 150, 56, ["initial state", "checkpoint or seed"]),
        box(390, 12, 158, 56, ["enter a phase", "surgery, optimizer"]),
        arrow((180, 40), (210, 40)),
        arrow((360, 40), (390, 40)),
        (
            '<rect x="30" y="100" width="518" height="236" rx="12" fill="none" stroke="currentColor" stroke-opacity="0.6"'
            ' stroke-dasharray="5 4"/>'
        ),
        text(44, 124, "each phase, until its steps are done", anchor="start"),
        arrow((470, 68), (470, 146)),
        box(44, 146, 130, 76, ["batch", "a function of", "step and seed"]),
        box(209, 146, 150, 76, ["step", "one program; skips", "non-finite updates"], "step"),
        box(394, 146, 142, 76, ["state", "model, optimizer", "state, step, slots"], "state"),
        arrow((174, 184), (209, 184)),
        arrow((359, 172), (394, 172)),
        arrow((394, 196), (359, 196)),
        box(44, 264, 150, 56, ["metrics", "fetched async"]),
        box(209, 264, 150, 56, ["evaluations", "read-only"]),
        box(394, 264, 142, 56, ["saves", "all or nothing"]),
        arrow((240, 222), (150, 264)),
        arrow((430, 222), (320, 264)),
        arrow((480, 222), (480, 264)),
        box(44, 366, 150, 56, ["trackers", "metrics.jsonl, ..."], "disk"),
        box(394, 366, 142, 56, ["step-N", "a checkpoint"], "disk"),
        arrow((119, 320), (119, 366)),
        arrow((465, 320), (465, 366)),
        arrow((465, 422), (465, 450), (14, 450), (14, 40), (30, 40), label="killed? same command again", at=(285, 444)),
    ]
    return picture("A run: from YAML through phases of steps to checkpoints, and back after a kill", 462, parts)


def data() -> str:
    """Data: from files to a batch, with packed documents, their segments and the loss mask."""
    stages = [
        (["files", ".txt, .jsonl, ..."], "disk"),
        (["token cache", "tokens, offsets"], "disk"),
        (["sequences", "packed to seq_len"], "plain"),
        (["batch", "sharded"], "step"),
    ]
    parts = []
    for number, (lines, kind) in enumerate(stages):
        x = 8 + 138 * number
        parts.append(box(x, 12, 128, 56, lines, kind))
        if number:
            parts.append(arrow((x - 10, 40), (x, 40)))
    parts.append(text(8, 106, "one packed sequence", bold=True, anchor="start"))
    rows = [
        ("tokens", ["A1", "A2", "A3", "B1", "B2", "B3", "B4", "C1"]),
        ("segment", ["1", "1", "1", "2", "2", "2", "2", "3"]),
        ("loss mask", ["1", "1", "0", "1", "1", "1", "0", "1"]),
    ]
    kinds = {"A": "state", "B": "step", "C": "disk"}
    tokens = rows[0][1]
    for number, (name, values) in enumerate(rows):
        y = 120 + 36 * number
        parts.append(text(8, y + 19, name, anchor="start"))
        for place, value in enumerate(values):
            parts.append(box(90 + 57 * place, y, 53, 28, [value], kinds[tokens[place][0]]))
    parts += [
        text(8, 252, "Attention stays within a segment. No token predicts across documents,", anchor="start"),
        text(8, 270, "so the last token of each document has no loss.", anchor="start"),
    ]
    return picture("Data: files become a token cache, packed sequences and batches", 282, parts)


def mesh() -> str:
    """The mesh: eight devices as replica x data x model, and where parameters and batch lie on it."""
    parts = [text(8, 22, "eight devices: replica 1 x data 4 x model 2", bold=True, anchor="start")]
    parts += [text(115 + 90 * model, 48, f"model {model}") for model in range(2)]
    for row in range(4):
        parts.append(text(8, 82 + 50 * row, f"data {row}", anchor="start"))
        parts += [
            box(74 + 90 * model, 58 + 50 * row, 82, 40, [f"device {2 * row + model}"], "step") for model in range(2)
        ]
    rows = [
        ("fsdp_axis: embed", "stored in 4 parts along data,", "gathered layer by layer"),
        ("tensor_parallel_axes: [mlp, heads]", "in 2 parts along model,", "for computation too"),
        ("batch_axis: batch", "each row of devices has", "a quarter of the sequences"),
    ]
    for number, lines in enumerate(rows):
        parts.append(box(276, 34 + 76 * number, 276, 68, list(lines), "state"))
    return picture("The mesh of devices, and which logical axes are sharded over which of its axes", 268, parts)


def checkpoint() -> str:
    """A checkpoint: how it is written, and how a start finds one."""
    parts = [
        text(8, 22, "saving", bold=True, anchor="start"),
        box(8, 34, 164, 56, ["write arrays", "invisible yet"]),
        box(198, 34, 164, 56, ["write checksums", "of every file"]),
        box(388, 34, 164, 56, ["commit", "step-N is visible"], "disk"),
        arrow((172, 62), (198, 62)),
        arrow((362, 62), (388, 62)),
        text(8, 128, "starting", bold=True, anchor="start"),
        box(8, 140, 164, 56, ["newest step-N", "check the checksums"], "disk"),
        box(198, 140, 164, 56, ["compare", "manifest and plan"]),
        box(388, 140, 164, 56, ["restore", "onto today's mesh"], "state"),
        arrow((172, 168), (198, 168)),
        arrow((362, 168), (388, 168)),
        box(8, 232, 164, 56, ["step-N.damaged", "set aside"]),
        arrow((70, 196), (70, 232), label="damaged", at=(62, 219), anchor="end"),
        arrow((120, 232), (120, 196), label="try the one before", at=(128, 219), anchor="start"),
    ]
    return picture("A checkpoint: complete or invisible; a damaged one is set aside", 300, parts)


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"run.svg": run(), "data.svg": data(), "mesh.svg": mesh(), "checkpoint.svg": checkpoint()}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file, content in pictures().items():
        (PICTURES / file).write_text(content, encoding="utf-8")
