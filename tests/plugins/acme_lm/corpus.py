"""Written-out sums: a data source that reads no file, `data: {source: {type: acme_sums, ...}}`."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlm.data.sources.source_config import CorpusConfig


@CorpusConfig.register_subclass("acme_sums")
@dataclass(frozen=True)
class Sums(CorpusConfig):
    """Lines like `3 + 4 = 7`.

    Attributes:
        num_records: number of records per split.
        largest: the largest number in a sum.
    """

    num_records: int = 1000
    largest: int = 99

    @property
    def splits(self) -> Sequence[str]:
        return ("train", "validation")

    @property
    def version(self) -> str:
        """Increase this with every change to `records`."""
        return "1"

    def records(self, split: str) -> Iterator[Mapping[str, Any]]:
        numbers = random.Random(split)
        for _ in range(self.num_records):
            a, b = (numbers.randint(0, self.largest) for _ in range(2))
            yield {"text": f"{a} + {b} = {a + b}"}
