"""The files of a table: CSV, LaTeX and a picture."""

import csv
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.redaction import write_text
from jaxlm.evals.tables.base import Column, Picture, Row, Table

_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def write_table(table: Table, folder: Path) -> list[str]:
    """Writes the files of a table, and returns their names."""
    with (folder / f"{table.name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [column.name for column in table.columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.rows)
    write_text(folder / f"{table.name}.tex", latex(table))
    names = [f"{table.name}.csv", f"{table.name}.tex"]
    if table.picture is not None:
        names.append(f"{table.name}{table.picture.suffix}.png")
        _draw(table, table.picture, folder / names[-1])
    return names


def latex(table: Table) -> str:
    """A `table` environment with rules of the package booktabs. It is for `\\input`."""
    kinds = "".join("l" if _is_text(table, column) else "r" for column in table.columns)
    lines = [" & ".join(_escaped(column.title) for column in table.columns)]
    lines += [" & ".join(_cell(row[column.name], column) for column in table.columns) for row in table.rows]
    head, *body = (rf"    {line} \\" for line in lines)
    return "\n".join(
        (
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_escaped(table.caption)}}}",
            rf"  \label{{tab:{table.name}}}",
            rf"  \begin{{tabular}}{{{kinds}}}",
            r"    \toprule",
            head,
            r"    \midrule",
            *body,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        )
    )


def _is_text(table: Table, column: Column) -> bool:
    return any(isinstance(row[column.name], str) for row in table.rows)


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return "--"
    if isinstance(value, str):
        return _escaped(value)
    return r"$\infty$" if value == math.inf else format(value, column.spec)


def _escaped(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _draw(table: Table, picture: Picture, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(picture.y), 4.2), dpi=120, layout="constrained")
    columns = {column.name: column for column in table.columns}
    for name, axes in zip(picture.y, figure.subplots(1, len(picture.y), squeeze=False)[0], strict=True):
        for label, style, points in _lines(table, picture, name):
            axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
        _scale(axes, picture, table)
        axes.set(xlabel=columns[picture.x].meaning, ylabel=columns[name].title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    with path.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)


def _scale(axes: Any, picture: Picture, table: Table) -> None:
    """A logarithmic axis with a tick at each length, from 0 upwards."""
    lengths = sorted({value for row in table.rows if isinstance(value := row[picture.x], int)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length}" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def _lines(table: Table, picture: Picture, y: str) -> Iterator[tuple[str, dict[str, Any], list[tuple[Any, Any]]]]:
    """Label, style and points of each line. A model has one color."""
    varying = [name for name in picture.lines if len({row[name] for row in table.rows}) > 1]
    models = list(dict.fromkeys(row["model"] for row in table.rows))
    keys = list(dict.fromkeys(tuple(row[name] for name in varying) for row in table.rows))
    titles = {column.name: column.title for column in table.columns}
    for number, model in enumerate(models):
        for key, style in zip(keys, itertools.cycle(_STYLES)):
            points = _points(table.rows, {"model": model, **dict(zip(varying, key, strict=True))}, picture.x, y)
            if points:
                label = ", ".join([str(model), *(f"{titles[n]} {v}" for n, v in zip(varying, key, strict=True))])
                yield label, {"color": f"C{number % 10}", **style}, points


_STYLES = [{"linestyle": line, "marker": marker} for line, marker in (("-", "o"), ("--", "s"), (":", "^"), ("-.", "d"))]


def _points(rows: Sequence[Row], of: Row, x: str, y: str) -> list[tuple[Any, Any]]:
    chosen = [row for row in rows if all(row[name] == value for name, value in of.items())]
    return sorted((row[x], row[y]) for row in chosen if isinstance(row[y], int | float) and math.isfinite(row[y]))
