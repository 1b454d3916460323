"""How well a model predicts the targets of a batch, and what their bytes are counted with."""

from dataclasses import dataclass

from jaxlm.core.imports import haliax as hax

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class TokenScores(eqx.Module):
    """How well a model predicts each target of a batch. Every field has the axes {batch, position}.

    Attributes:
        nats: float32, negative log-likelihood of the target.
        mask: float32, 1 if the target counts.
        targets: int32, the target's token id.
        inputs: int32, the id of the token before the target.
    """

    nats: hax.NamedArray
    mask: hax.NamedArray
    targets: hax.NamedArray
    inputs: hax.NamedArray

    def sums(self) -> jax.Array:
        """float32 [2], the loss of all targets that count, and their number. Losses of the others may be anything."""
        nats, mask = (scores.rearrange(self.mask.axes).array for scores in (self.nats, self.mask))
        return jnp.stack([jnp.sum(jnp.where(mask == 0, 0.0, mask * nats)), jnp.sum(mask)])


@dataclass(frozen=True)
class DummyPrefix:
    """The space that some tokenizers put in front of every text. It is not a byte of the text.

    Attributes:
        bos_id: the token before a text.
        tokens: bool [vocab], the tokens that begin with a space.
    """

    bos_id: int
    tokens: np.ndarray
