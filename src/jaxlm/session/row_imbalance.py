"""How uneven the work of the devices that share a row is, for the documents of the data and each order of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.stores import is_url
from jaxlm.data.row_order import imbalances
from jaxlm.plan.plan import Plan

_MAX_ROWS, _MAX_TOKENS = 64, 1 << 24  # of all sources together


@dataclass(frozen=True)
class RowImbalance:
    """The work of the device that has the most, relative to the mean over the devices that share a row.

    Attributes:
        num_rows: number of rows that were read, the first of each source.
        by_order: order of tokens (`trainer.context.balance`) -> (mean over these rows, the largest of them).
        problem: why no rows were read; empty if they were.
    """

    num_rows: int = 0
    by_order: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    problem: str = ""

    def describe(self) -> str:
        """For a table."""
        if self.problem:
            return f"unknown: {self.problem}"
        orders = (f"{order} {mean:.3f} (at most {most:.3f})" for order, (mean, most) in self.by_order.items())
        return f"{', '.join(orders)}: the slowest device relative to the mean, over the first {self.num_rows} rows"


def row_imbalance(plan: Plan) -> RowImbalance | None:
    """The imbalance of the first phase's data, if it is tokenized on this machine.

    None if no devices share a row, if each of them computes the attention of whole rows, or if the data has no text or is
    sampled during training.
    """
    num_shards, data = plan.layout.num_row_shards, plan.data[0]
    if num_shards == 1 or not data.corpus.train_sources:
        return None
    if is_url(data.cache_dir):
        return RowImbalance(problem=f"the token caches are not on this machine, but at {data.cache_dir}")
    if not data.is_tokenized():
        return RowImbalance(problem="the data is not tokenized. Run jaxlm prepare with this configuration")
    try:
        rows = _first_rows(plan)
    except (ConfigError, OSError) as error:
        return RowImbalance(problem=str(error))
    if not rows:
        return None
    by_row = [imbalances(row, num_shards, plan.layout.context.work) for row in rows]
    by_order = {order: [row[order] for row in by_row] for order in by_row[0]}
    return RowImbalance(len(rows), {order: (float(np.mean(v)), max(v)) for order, v in by_order.items()})


def _first_rows(plan: Plan) -> list[np.ndarray]:
    """The segment ids of the first rows of each source, int [seq_len] each; none if examples have no such column."""
    data, seq_len = plan.data[0], plan.phases[0].model.seq_len
    train = data.open(data.corpus.load_tokenizer(lambda _: None), seq_len, lambda _: None, summarize=False).train
    most = max(1, min(_MAX_ROWS, _MAX_TOKENS // seq_len) // len(train))
    sources = (examples.read(np.arange(min(most, len(examples)))) for examples in train.values())
    columns = (values for source in sources for name, values in source.items() if name.endswith("segment_ids"))
    return [row for values in columns for row in values.reshape(-1, seq_len)]
