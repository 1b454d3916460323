"""Training batches of responses that the current weights have sampled."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlm.data.base import Batches
from jaxlm.data.batch import Columns
from jaxlm.data.loader import BatchContext, BatchReader, leading_axes
from jaxlm.data.rollouts.maker import RolloutMaker
from jaxlm.data.rollouts.rollout import Rollout


class RolloutBatches(Batches):
    """Batches of groups of responses. A rollout is sampled before the first of the steps that train on it."""

    def __init__(self, reader: BatchReader, context: BatchContext, maker: RolloutMaker):
        self._reader, self._maker, self._log = reader, maker, context.services.log
        self._step = context.first_step
        self._consumed = 0
        self._skipped = 0
        self._rollout: Rollout | None = None
        self._metrics: Mapping[str, float] = {}

    def due(self, step: int) -> bool:
        return self._rollout is None or not self._rollout.first_step <= step < self._rollout.end

    def refresh(self, model: Any, step: int) -> None:
        assert step == self._step, "the run and its batches are at the same step"
        end, num_minibatches = self._steps_from(step)
        num_groups = num_minibatches * self._reader.batches.at(step).size
        groups, consumed, metrics = self._maker.make(model, step, self._consumed, num_groups)
        sampled = (groups.examples, groups.samples, groups.scores)
        self._rollout = Rollout.of((step, end), num_minibatches, *sampled, metrics)
        self._consumed = consumed

    def __next__(self) -> Any:
        step, rollout, reader = self._step, self._rollout, self._reader
        assert rollout is not None, "refresh comes first"
        assert not self.due(step), "refresh comes first"
        stage, numbers, seq_len = (
            reader.batches.at(step),
            rollout.groups_of(step),
            reader.mixture.examples_of(0).seq_len,
        )

        def read(rows: np.ndarray) -> Columns:
            """The columns of some rows. Rows past the batch size are padding: zeros."""
            groups = numbers[np.minimum(rows, stage.size - 1)]
            columns = rollout.columns(groups, self._maker.prompts(rollout.examples[groups]), seq_len)
            for column in columns.values():
                column[rows >= stage.size] = 0
            return columns

        batch = reader.spec.assemble(read, leading_axes(stage), reader.layout)
        self._step += 1
        self._metrics = rollout.metrics
        return batch

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def read_ahead(self) -> None:
        return

    def state(self) -> dict[str, Any]:
        """{"examples": number of prompts consumed, "step": step of the next batch}, and what a curriculum has learned.

        Between two updates of one rollout, also the `rollout`: it cannot be sampled again, because the weights that have
        sampled it are gone. `skipped` is how many prompts were left out; absent if none were.
        """
        skipped = {"skipped": self._skipped} if self._skipped else {}
        held: dict[str, Any] = {}
        if self._rollout is not None and not self.due(self._step):
            held = {"rollout": self._rollout.state(), "prompts": self._checksum(self._rollout)}
        curriculum = self._maker.order.curriculum
        learned = {} if curriculum is None else {"curriculum": curriculum.state()}
        return {"examples": self._consumed, "step": self._step, **skipped, **learned, **held}

    def restore(self, state: dict[str, Any]) -> None:
        self._consumed, self._step = int(state["examples"]), int(state.get("step", self._step))
        self._skipped = int(state.get("skipped", 0))
        if self._maker.order.curriculum is not None:
            self._maker.order.curriculum.restore(state.get("curriculum", {}))
        if "rollout" not in state:
            self._rollout = None
            return
        self._rollout = Rollout.restored(state["rollout"]) if Rollout.is_whole(state["rollout"]) else None
        if self._rollout is None or not self._still_fits(self._rollout, state["prompts"]):
            self._log(
                "the rollout in the checkpoint has groups or batches of another size, or other prompts, so a new one is"
                " sampled"
            )
            self._rollout = None

    def skip(self, num_steps: int) -> None:
        prompts = self._reader.batches.examples_between(self._step, self._step + num_steps)
        self._consumed += prompts
        self._skipped += prompts
        self._rollout = None

    def records(self, step: int) -> str:
        rollout = self._rollout
        if rollout is None or not rollout.first_step <= step < rollout.end:
            return "prompts of an earlier rollout"
        return self._maker.describe(rollout.examples[rollout.groups_of(step)])

    def close(self) -> None:
        self._maker.close()

    def _steps_from(self, step: int) -> tuple[int, int]:
        """The end of the rollout that begins with a step, and its number of mini-batches, which have the same size."""
        batches, options = self._reader.batches, self._maker.options
        end = step + 1
        while end < step + options.updates_per_rollout and batches.at(end).size == batches.at(step).size:
            end += 1
        return end, min(options.minibatches_per_rollout, end - step)

    def _still_fits(self, rollout: Rollout, checksum: int) -> bool:
        """Whether the configuration still gives the steps of a rollout these groups and rewards, and its examples these
        prompts."""
        options = self._maker.options
        size = self._reader.batches.at(self._step).size * rollout.num_minibatches
        has_shape = rollout.reward_parts.shape == (size, options.group_size, len(options.reward_names))
        return has_shape and self._checksum(rollout) == checksum

    def _checksum(self, rollout: Rollout) -> int:
        return zlib.crc32(b"".join(prompt.tobytes() for prompt in self._maker.prompts(rollout.examples)))
