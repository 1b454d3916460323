"""Draws the two diagrams in docs/concepts.md: `python docs/generate_pictures.py`.

Lines and text are a gray that is readable on light and on dark pages. Fills are pale and nearly transparent.
"""

from pathlib import Path
from xml.sax.saxutils import escape

PICTURES = Path(__file__).parent / "pictures"
INK = "#7d8590"
FILLS = {"plain": "none", "state": "#4c8dff", "step": "#2fa84f", "disk": "#d9822b"}


def box(x: int, y: int, width: int, height: int, lines: list[str], kind: str = "plain") -> str:
    """A rounded box with centered lines of text, the first one bold."""
    fill = f'fill="{FILLS[kind]}" fill-opacity="0.15" stroke="{INK}"'
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" {fill}/>'
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    return shape + "".join(
        text(x + width / 2, top + 18 * number, line, bold=number == 0) for number, line in enumerate(lines)
    )


def text(x: float, y: float, line: str, *, bold: bool = False, anchor: str = "middle") -> str:
    """One line of text."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(line)}</text>'


def arrow(*points: tuple[int, int], label: str = "", at: tuple[int, int] | None = None) -> str:
    """A polyline with an arrowhead at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"/>'
    return line + (text(*at, label) if at else "")


def picture(name: str, title: str, width: int, height: int, parts: list[str]) -> str:
    """A complete SVG file."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}"'
        f' font-family="sans-serif" font-size="13" fill="{INK}">\n'
        f"<title>{title}</title>\n<defs>{head}</defs>\n{body}\n</svg>\n"
    )


def run() -> str:
    """The diagram of a run: what happens before, inside and between the steps of a phase."""
    parts = [
        box(20, 20, 150, 60, ["resolve, check", "YAML to a plan"]),
        box(210, 20, 190, 60, ["start", "checkpoint, weights, or seed"]),
        box(440, 20, 290, 60, ["enter the phase", "surgery, trainable leaves, optimizer state"]),
        arrow((170, 50), (210, 50)),
        arrow((400, 50), (440, 50)),
        f'<rect x="20" y="115" width="710" height="215" rx="12" fill="none" stroke="{INK}" stroke-dasharray="5 4"/>',
        text(36, 138, "each phase, until its last step", anchor="start"),
        arrow((585, 80), (585, 160)),
        box(40, 160, 150, 70, ["batch", "a function of step,", "seed and weights"]),
        box(270, 160, 190, 70, ["step", "one compiled program;", "non-finite: skipped"], "step"),
        box(520, 160, 190, 70, ["state", "step, key, model,", "optimizer state, slots"], "state"),
        arrow((190, 195), (270, 195)),
        arrow((460, 185), (520, 185)),
        arrow((520, 207), (460, 207)),
        box(40, 262, 190, 50, ["metrics", "at most four steps behind"]),
        box(270, 262, 190, 50, ["evaluations", "look, change nothing"]),
        box(520, 262, 190, 50, ["saves", "complete or invisible"]),
        arrow((310, 230), (190, 262)),
        arrow((560, 230), (440, 262)),
        arrow((615, 230), (615, 262)),
        box(40, 356, 190, 54, ["trackers", "metrics.jsonl, wandb, ..."], "disk"),
        box(520, 356, 190, 54, ["step-N", "N steps are done"], "disk"),
        arrow((135, 312), (135, 356)),
        arrow((615, 312), (615, 356)),
        arrow(
            (615, 410), (615, 435), (8, 435), (8, 50), (20, 50), label="killed: the same command resumes", at=(380, 428)
        ),
    ]
    return picture(
        "run", "A run: from YAML through phases of steps to checkpoints, and back after a kill", 750, 450, parts
    )


def mesh() -> str:
    """The diagram of a mesh: eight devices as replica x data x model, and how parameters and batch are sharded."""
    parts = [text(20, 24, "replica 1 x data 4 x model 2: eight devices", bold=True, anchor="start")]
    for data in range(4):
        parts.append(text(20, 92 + 62 * data, f"data {data}", anchor="start"))
        for model in range(2):
            x, y = 90 + 130 * model, 62 + 62 * data
            parts.append(box(x, y, 120, 52, [f"device {2 * data + model}"], "step"))
    parts += [text(150 + 130 * model, 52, f"model {model}") for model in range(2)]
    rows = [
        ("fsdp_axis: embed", "data", "`embed` of each parameter has four shards,", "gathered layer by layer"),
        ("tensor_parallel_axes: mlp, heads", "model", "`mlp` and `heads` have two shards,", "also during computation"),
        ("batch_axis: batch", "replica, data", "every row of devices processes", "a quarter of the sequences"),
    ]
    for number, (key, axis, *meaning) in enumerate(rows):
        y = 62 + 86 * number
        parts.append(box(390, y, 360, 76, [f"{key} -> {axis}", *(line.replace("`", "") for line in meaning)], "state"))
    return picture("mesh", "The device mesh, and which logical axes are sharded over which mesh axes", 760, 330, parts)


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"run.svg": run(), "mesh.svg": mesh()}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file, content in pictures().items():
        (PICTURES / file).write_text(content, encoding="utf-8")
