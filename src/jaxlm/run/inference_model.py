"""A model for your own Python programs: `jaxlm.load`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.core.axes import BATCH, EMBED, POSITION
from jaxlm.core.errors import ConfigError, check_at_least
from jaxlm.core.sharding import current_layout
from jaxlm.models.base import FINAL, Inputs, LanguageModel
from jaxlm.models.inference.padding import padded_length, round_up
from jaxlm.run.load_model import AS_TRAINED, LoadedModel, open_model

Text = str | Sequence[int]
"""A string, or token ids."""


@dataclass(frozen=True)
class InferenceModel:
    """A model on the devices of this process, with its adapters merged.

    Attributes:
        loaded: where it comes from, its tokenizer and its plan.
        model: the parameters, in the compute dtype of `trainer.mp`.
    """

    loaded: LoadedModel
    model: LanguageModel

    def hidden(
        self, texts: Sequence[Text], taps: Sequence[str] = (FINAL,), *, batch_size: int = 8
    ) -> dict[str, list[np.ndarray]]:
        """The residual stream at named places, for each token of each text.

        Args:
            texts: strings, tokenized as transformers does, including special tokens; or token ids.
            taps: `embedding` for the input of the first layer, `layer_N` for the output of layer N (from 0), `final` for
                the output of the final norm, which is the input of the head.
            batch_size: texts per forward pass.

        Returns:
            Tap -> one float32 array [tokens, embed] per text.

        Raises:
            ConfigError: a text has no tokens or is longer than the model's `seq_len`, an id is not in the vocabulary, or
                the model has no such tap.
        """
        check_at_least("batch_size", batch_size, 1)
        if isinstance(texts, str) or isinstance(taps, str):
            raise ConfigError("hidden: a string given for texts or taps, but a list expected, such as ['final']")
        ids = [self._ids(number, text) for number, text in enumerate(texts)]
        found: dict[str, list[np.ndarray]] = {tap: [] for tap in taps}
        with self.loaded.plan.layout.use():
            for start in range(0, len(ids), batch_size):
                batch = ids[start : start + batch_size]
                states = _taps(self.model, _right_padded(batch, batch_size, self.model.Pos.size), tuple(taps))
                for tap, array in states.items():
                    rows = np.asarray(array)
                    found[tap] += [rows[row, : len(text)] for row, text in enumerate(batch)]
        return found

    def _ids(self, number: int, text: Text) -> list[int]:
        tokenizer, vocab_size, seq_len = self.loaded.tokenizer, self.model.Vocab.size, self.model.Pos.size
        is_text = isinstance(text, str)
        ids = tokenizer.encode_like_transformers(text, add_special_tokens=True) if is_text else list(map(int, text))
        if not 0 < len(ids) <= seq_len:
            raise ConfigError(
                f"hidden: text {number} has {len(ids)} tokens. Expected 1 to {seq_len}, the model's seq_len"
            )
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ConfigError(
                f"hidden: text {number} has ids from {min(ids)} to {max(ids)}, but the vocabulary has {vocab_size} tokens"
            )
        return ids


def load(
    name: str | Path, *, weights: str = AS_TRAINED, adapter: str | None = None, keys: Mapping[str, Any] | None = None
) -> InferenceModel:
    """See `jaxlm.load`."""
    loaded = open_model(str(name), keys or {}, adapter, weights)
    with loaded.plan.layout.use():
        return InferenceModel(loaded, loaded.for_inference())


def _right_padded(batch: Sequence[Sequence[int]], batch_size: int, seq_len: int) -> Inputs:
    """The texts as rows of a few different lengths. Padding has segment id 0, which nothing attends to."""
    layout = current_layout()
    num_rows = round_up(batch_size, 1 if layout is None else layout.num_shards(BATCH))
    width = min(seq_len, padded_length(max(map(len, batch))))
    tokens, positions, segment_ids = (np.zeros((num_rows, width), np.int32) for _ in range(3))
    for row, ids in enumerate(batch):
        tokens[row, : len(ids)] = ids
        positions[row, : len(ids)] = np.arange(len(ids))
        segment_ids[row, : len(ids)] = 1
    axes = (Axis(BATCH, num_rows), Axis(POSITION, width))
    return Inputs(*(hax.named(jnp.asarray(column), axes) for column in (tokens, positions, segment_ids)))


@eqx.filter_jit
def _taps(model: LanguageModel, inputs: Inputs, taps: tuple[str, ...]) -> dict[str, jax.Array]:
    """float32 [batch, position, embed] by tap, on every device."""
    states = model.hidden(hax.auto_sharded(inputs), taps=taps).taps
    arrays = {tap: state.rearrange((BATCH, POSITION, EMBED)).array.astype(jnp.float32) for tap, state in states.items()}
    layout = current_layout()
    return arrays if layout is None else jax.lax.with_sharding_constraint(arrays, layout.replicated())
