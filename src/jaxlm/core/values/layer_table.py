"""Numbers of every layer as one line of a log, which pictures of the run read back."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^(\w+): (.*), by layer \((.*)\): (0: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class LayerTable:
    """Numbers of every layer.

    Attributes:
        source: what has measured them, such as the `type` of a surgery.
        title: what was decided or measured.
        columns: names of the numbers of a layer, without commas.
        rows: the numbers of each layer, from 0.
    """

    source: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float]]

    def line(self) -> str:
        """As one line without its end. Numbers have 4 decimals."""
        layers = (f"{layer}: {', '.join(f'{x:.4f}' for x in row)}" for layer, row in enumerate(self.rows))
        return f"{self.source}: {self.title}, by layer ({', '.join(self.columns)}): {'; '.join(layers)}"


def tables_in(log: str) -> list[LayerTable]:
    """The tables in the lines of a log, each once. Lines that are cut off or changed are left out."""
    tables: dict[str, LayerTable] = {}
    for match in _LINE.finditer(log):
        source, title, columns, layers = match.groups()
        try:
            rows = [[float(x) for x in row.partition(": ")[2].split(", ")] for row in layers.split("; ")]
        except ValueError:
            continue
        table = LayerTable(source, title, columns.split(", "), rows)
        if all(len(row) == len(table.columns) for row in rows):
            tables[match[0]] = table
    return list(tables.values())
