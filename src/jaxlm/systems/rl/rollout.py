"""A rollout: sampled groups with their rewards, and their form in a checkpoint and in a batch."""

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.data.batch import Columns, shifted_columns
from jaxlm.systems.rl.samplers import Sample

_ARRAYS = {
    "examples": np.int64,
    "lengths": np.int32,
    "tokens": np.int32,
    "mask": np.uint8,
    "logps": np.float32,
    "rewards": np.float32,
    "reward_parts": np.float32,
    "finished": np.uint8,
}


@dataclass(frozen=True)
class Rollout:
    """The groups that some consecutive steps train on, mini-batch after mini-batch.

    Attributes:
        first_step, end: the steps.
        num_minibatches: step `first_step + n` trains on mini-batch `n % num_minibatches`.
        examples: int64 [groups], number of each group's prompt among the training examples.
        lengths: int32 [groups, group], tokens of each response.
        tokens: int32 [sum of lengths], the responses one after another.
        mask: uint8 [sum of lengths], 1 where the policy wrote the token.
        logps: float32 [sum of lengths], log-likelihoods of the tokens under the distribution they were sampled from.
        rewards: float32 [groups, group].
        reward_parts: float32 [groups, group, rewards], what they are the weighted sums of; NaN where one does not apply.
        finished: uint8 [groups, group], 0 for a response that was cut off.
        metrics: what is logged of it.
    """

    first_step: int
    end: int
    num_minibatches: int
    examples: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    logps: np.ndarray
    rewards: np.ndarray
    reward_parts: np.ndarray
    finished: np.ndarray
    metrics: Mapping[str, float]

    @staticmethod
    def of(
        steps: tuple[int, int],
        num_minibatches: int,
        examples: np.ndarray,
        samples: Sequence[Sample],
        scores: np.ndarray,
        metrics: Mapping[str, float],
    ) -> "Rollout":
        """Args: samples: group after group; scores: [rewards + 1, groups, group], the last are the weighted sums."""

        def joined(name: str) -> np.ndarray:
            parts = [np.asarray(getattr(sample, name), _ARRAYS[name]) for sample in samples]
            return np.concatenate(parts)

        lengths = np.array([len(sample.tokens) for sample in samples], np.int32).reshape(scores.shape[1:])
        finished = np.array([sample.is_finished for sample in samples], np.uint8).reshape(lengths.shape)
        rewards, parts = scores[-1].astype(np.float32), np.moveaxis(scores[:-1], 0, -1).astype(np.float32)
        arrays = (joined("tokens"), joined("mask"), joined("logps"), rewards, parts, finished)
        return Rollout(*steps, num_minibatches, examples, lengths, *arrays, dict(metrics))

    def state(self) -> dict[str, Any]:
        """As plain JSON. Arrays are compressed, and exact."""
        return {
            "first_step": self.first_step,
            "end": self.end,
            "num_minibatches": self.num_minibatches,
            "shape": list(self.lengths.shape),
            "arrays": {name: packed(getattr(self, name)) for name in _ARRAYS},
            "metrics": dict(self.metrics),
        }

    @staticmethod
    def is_whole(state: Mapping[str, Any]) -> bool:
        """Tells whether a state has all arrays. Those of earlier versions have fewer."""
        return state["arrays"].keys() >= _ARRAYS.keys()

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "Rollout":
        """The rollout of a state."""
        arrays = {name: unpacked(state["arrays"][name], dtype) for name, dtype in _ARRAYS.items()}
        for name in ("lengths", "rewards", "finished"):
            arrays[name] = arrays[name].reshape(state["shape"])
        arrays["reward_parts"] = arrays["reward_parts"].reshape(*state["shape"], -1)
        first_step, end, num_minibatches = (int(state[name]) for name in ("first_step", "end", "num_minibatches"))
        return Rollout(first_step, end, num_minibatches, **arrays, metrics=dict(state["metrics"]))

    @property
    def group_size(self) -> int:
        return self.lengths.shape[1]

    def groups_of(self, step: int) -> np.ndarray:
        """int64: the numbers of the groups that a step trains on."""
        size = len(self.examples) // self.num_minibatches
        return (step - self.first_step) % self.num_minibatches * size + np.arange(size)

    def columns(self, groups: np.ndarray, prompts: Sequence[np.ndarray], seq_len: int) -> Columns:
        """The columns of `GroupBatch` for some groups, [groups, group, ...] each. Args: prompts: the groups' tokens."""
        shape = (len(groups), self.group_size, seq_len)
        ids = np.zeros((*shape[:-1], seq_len + 1), np.int32)
        inside = np.zeros(ids.shape, bool)
        mask, logps = (np.zeros(ids.shape, np.float32) for _ in range(2))
        starts = np.cumsum(self.lengths.ravel()).reshape(self.lengths.shape) - self.lengths
        for row, (group, prompt) in enumerate(zip(groups.tolist(), prompts, strict=True)):
            ids[row, :, : len(prompt)] = prompt
            for number, (start, length) in enumerate(zip(starts[group], self.lengths[group], strict=True)):
                written, end = slice(start, start + length), len(prompt) + length
                ids[row, number, len(prompt) : end] = self.tokens[written]
                mask[row, number, len(prompt) : end] = self.mask[written]
                logps[row, number, len(prompt) : end] = self.logps[written]
                inside[row, number, :end] = True
        return {
            **shifted_columns(ids, inside, mask),
            "sampler_logps": logps[..., 1:] * mask[..., 1:],
            "rewards": self.rewards[groups],
            "reward_parts": self.reward_parts[groups],
            "finished": self.finished[groups].astype(np.float32),
        }


def packed(array: np.ndarray) -> str:
    """An array as a text, compressed and exact."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes())).decode()


def unpacked(text: str, dtype: Any) -> np.ndarray:
    """The array that `packed` has made a text of, flat."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
