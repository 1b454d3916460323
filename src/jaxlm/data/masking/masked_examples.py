"""Examples with hidden tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxlm.data.batch import Columns
from jaxlm.data.examples import Examples, WrappedExamples
from jaxlm.data.masking.masking_config import Masker
from jaxlm.data.masking.uniform_numbers import stratified

_TIMES = 3  # what a random shift is for; the masks have the numbers before


class MaskedExamples(WrappedExamples):
    """Examples of which some tokens are hidden: in `num_replicas` ways, each an example of its own, or in a new way whenever
    one is drawn.

    Of R ways, index i R + r is way r of example i.

    Args:
        num_replicas: None for a new way at every draw. Then `read` alone returns that of the first.
    """

    def __init__(self, examples: Examples, masker: Masker, num_replicas: int | None):
        super().__init__(examples)
        self._masker, self._num_replicas = masker, num_replicas
        self.is_endless = examples.is_endless and num_replicas is None
        self.arrangement = {**examples.arrangement, "masking": {**masker.identity(), "replicas": num_replicas}}

    def __len__(self) -> int:
        return len(self._examples) * (self._num_replicas or 1)

    @property
    def summary(self) -> str | None:
        ways = "in a new way in each epoch" if self._num_replicas is None else f"in {self._num_replicas} ways"
        masked = f"tokens of each sequence are hidden {ways}"
        return masked if self._examples.summary is None else f"{self._examples.summary}; {masked}"

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return self._examples.starts(self._of(indices))

    def target_positions(self, indices: np.ndarray) -> np.ndarray:
        return self._examples.target_positions(self._of(indices)) - 1  # a token is its own target

    def read_ahead(self, indices: np.ndarray) -> None:
        self._examples.read_ahead(self._of(indices))

    def read(self, indices: np.ndarray) -> Columns:
        return self._masked(self._of(indices), indices % (self._num_replicas or 1), indices)

    def read_drawn(self, indices: np.ndarray, epochs: np.ndarray, numbers: np.ndarray) -> Columns:
        return self.read(indices) if self._num_replicas is not None else self._masked(indices, epochs, numbers)

    def show(self, index: int, tokenizer: Any) -> Iterator[str]:
        return self._examples.show(index // (self._num_replicas or 1), tokenizer)

    def num_apart_from(self, first: int) -> int:
        return self._examples.num_apart_from(first)

    def _of(self, indices: np.ndarray) -> np.ndarray:
        """The numbers of the examples."""
        return indices // (self._num_replicas or 1)

    def _masked(self, indices: np.ndarray, draws: np.ndarray, order: np.ndarray) -> Columns:
        """Args: order: numbers over any range of which times are spread evenly."""
        masker = self._masker
        # The same shift for all sources, whose examples are in one batch.
        times = stratified(order, (masker.config.seed, _TIMES), masker.config.strata)
        return masker.mask(self._examples.read(indices), indices, draws, times)
