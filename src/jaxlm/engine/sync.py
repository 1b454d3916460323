"""How all processes take the same decision at the same step.

A signal reaches one process, and only process 0 may read the clock; yet all must save and stop together. Each process
puts its wishes on a ballot that the compiled step reduces over all devices, so the result returns with the metrics that
are fetched anyway and nobody waits for anybody. With one process there is nothing to agree on, and a wish counts at once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.core.sharding import Layout


@dataclass(frozen=True)
class Wishes:
    """What a process wants.

    Attributes:
        stop: a signal's number, or 0.
        save: whether a checkpoint is due by the clock.
    """

    stop: int = 0
    save: bool = False


class Ballot:
    """Carries wishes to the compiled step and back."""

    def __init__(self, layout: Layout):
        self._alone = jax.process_count() == 1
        self._like = Ballot.abstract(layout)
        self._blank = self._filled(Wishes())

    @staticmethod
    def abstract(layout: Layout) -> jax.ShapeDtypeStruct:
        """Shape, dtype and place of what `cast` returns."""
        place = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
        return jax.ShapeDtypeStruct((layout.mesh.size, 2), np.int32, sharding=place)

    def cast(self, wishes: Wishes) -> jax.Array:
        """int32 {device, wish}: every local device carries this process's wishes."""
        return self._blank if self._alone or wishes == Wishes() else self._filled(wishes)

    def result(self, wishes: Wishes, tally: np.ndarray | None) -> Wishes:
        """The common decision: one's own wishes when alone, else what the last fetched tally says."""
        if self._alone:
            return wishes
        return Wishes() if tally is None else Wishes(stop=int(tally[0]), save=bool(tally[1]))

    def _filled(self, wishes: Wishes) -> jax.Array:
        rows = np.broadcast_to(np.array([wishes.stop, wishes.save], np.int32), self._like.shape)
        return jax.make_array_from_callback(self._like.shape, self._like.sharding, lambda index: rows[index])


def tally(ballot: jax.Array) -> jax.Array:
    """int32 {wish}: the strongest wish of each kind over all devices (traced)."""
    return jnp.max(ballot, axis=0)
