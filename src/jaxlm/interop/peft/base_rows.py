"""Rows of the vocabulary that the base of an adapter has and the trained model does not.

A run's embedding has a row for each token of its tokenizer; published tables often have more. PEFT loads adapters only into
a base with as many rows as they have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxlm.core.axes import VOCAB
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.tensor_files import TensorSource
from jaxlm.interop.hf.weights import Tensor
from jaxlm.interop.peft.names import EMBEDDING, LINEAR, MAGNITUDE, PREFIX, module_name


@dataclass(frozen=True)
class BaseRows:
    """Holds the vocabulary of a base.

    Attributes:
        name: of the base.
        num_rows: of its token embedding.
        open: its weights.
    """

    name: str
    num_rows: int
    open: Callable[[], TensorSource]

    def added_to(
        self, tensors: Mapping[str, np.ndarray], table: Sequence[Tensor], num_rows: int
    ) -> dict[str, np.ndarray]:
        """Adds the base's rows to an adapter's tensors: adapters do not change them, and copies have their values.

        Args:
            table: the table of weights.
            num_rows: of the trained model.

        Raises:
            ConfigError: the adapter has numbers that depend on the rows which the trained model does not have.
        """
        extended, missing = dict(tensors), self.num_rows - num_rows
        owners = [tensor for tensor in table if tensor.parts[0].dims[0] == (VOCAB,)] if missing > 0 else []
        for tensor in owners:
            module = f"{PREFIX}{module_name(tensor, None)}"
            if f"{module}.{MAGNITUDE}" in tensors:
                raise ConfigError(
                    f"{module_name(tensor, None)} has a DoRA adapter, whose magnitudes depend on the {missing} rows that"
                    f" {self.name} has and this model does not. Export the merged model: --adapters merge"
                )
            for name, axis in ((f"{module}.{EMBEDDING[0]}", 1), (f"{module}.{LINEAR[1]}", 0)):
                if name in tensors:
                    pads = [(0, missing if dim == axis else 0) for dim in range(2)]
                    extended[name] = np.pad(tensors[name], pads)
            for name in (f"{module}.weight", f"{module}.base_layer.weight"):
                if name in tensors:
                    rows = self._rows(tensor, owners[0])[num_rows:].astype(tensors[name].dtype)
                    extended[name] = np.concatenate([tensors[name], rows])
        return extended

    def _rows(self, tensor: Tensor, embedding: Tensor) -> np.ndarray:
        """The base's table. A tied head may not be in its file, whose names may begin later."""
        source = self.open()
        names = [name for name in source.tensors for one in (tensor, embedding) if one.name.endswith(name)]
        return source.view(min(names, key=lambda name: not tensor.name.endswith(name)))
