"""How good a reference must be at text before anything is built on it."""

import math
from dataclasses import dataclass

from jaxlm.core.field_types import AboveOne, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class SanityConfig:
    """Refuses a reference whose loss on the run's own text is too high: another tokenizer, the wrong folder, or weights that
    were read in the wrong order. It is measured once, before the phase that is the first to read the reference.

    Attributes:
        max_loss: largest mean next-token loss in nats. If both limits are null, it is that of a guess among all tokens of the
            vocabulary alike: ln(vocabulary).
        max_perplexity: largest exp(loss). With `max_loss`, the smaller limit counts.
        batches: training batches of the phase to measure it on.
    """

    max_loss: PositiveFloat | None = None
    max_perplexity: AboveOne | None = None
    batches: PositiveInt = 2

    def limit(self, vocab_size: int) -> tuple[float, str]:
        """The largest loss in nats, and what says so."""
        limits = [] if self.max_loss is None else [(self.max_loss, f"max_loss: {self.max_loss:g}")]
        if self.max_perplexity is not None:
            limits.append((math.log(self.max_perplexity), f"max_perplexity: {self.max_perplexity:g}"))
        guess = (math.log(vocab_size), f"that of a guess among all {vocab_size:,} tokens alike")
        return min(limits, default=guess)
