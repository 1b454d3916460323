"""The leaves of the initial model that depend on the training tokens: computed once, from a sample of the first phase's."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxlm.core import tree
from jaxlm.core.runtime import broadcast_from_main, main_only
from jaxlm.data.base import Log
from jaxlm.data.batch_schedule import BatchSchedule
from jaxlm.data.cache.derived_arrays import ARRAYS, Arrays
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.config import DataConfig
from jaxlm.data.data import Data
from jaxlm.data.examples import Examples
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.base import LeavesFromTokens, token_leaves
from jaxlm.plan.plan import Plan

_FOLDER = "derived"


def leaves_from_tokens(plan: Plan, tokenizer: Tokenizer, log: Log) -> Arrays:
    """Path -> value of these leaves, the same on all processes; empty if the model has none. All processes must call this."""
    model, builder = plan.model, plan.state_builder
    wanted = token_leaves(model, builder.Vocab.size)
    if wanted is None:
        return {}
    section = plan.data[0]

    def compute() -> Arrays:
        data = section.open(tokenizer, model.seq_len, log, summarize=False)
        return compute_leaves(wanted, section, data, builder.Vocab.size, plan.batches.of(plan.phases[0]), log)

    computed = main_only(compute)  # the others need not even see its caches
    abstract = dict(tree.leaves(builder.abstract_initial_model))
    empty = {path: np.zeros(abstract[path].array.shape, abstract[path].dtype) for path in wanted.paths}
    return {path: broadcast_from_main((computed or empty)[path]) for path in wanted.paths}


def compute_leaves(
    wanted: LeavesFromTokens, section: DataConfig, data: Data, vocab_size: int, batches: BatchSchedule, log: Log
) -> Arrays:
    """These leaves for a model that is trained on this data first. They are in the cache afterwards.

    Args:
        batches: batch sizes by step of the run, on which it depends what `max_train_batches` leaves.
    """
    samples = list(_samples(data, data.trained_on(batches), wanted.num_tokens))
    made_from = {
        "leaves": dict(wanted.key),
        "vocabulary": vocab_size,
        "tokens": [sample.identity for sample in samples],
    }

    def compute() -> dict[str, np.ndarray]:
        started, num_tokens = time.perf_counter(), sum(int(sample.lengths.sum()) for sample in samples)
        log(f"computing {', '.join(wanted.paths)} from {num_tokens:,} training tokens ...")
        values = wanted.compute([sequence for sample in samples for sequence in sample.read()])
        log(f"computed in {time.perf_counter() - started:.1f} s")
        return dict(values)

    return ARRAYS.open_or_compute(section.corpus.store.folder / _FOLDER, made_from, compute, log)


@dataclass(frozen=True)
class _Sample:
    """Ranges of the tokens of a source."""

    cache: TokenCache
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def identity(self) -> list[str]:
        places = hashlib.sha256(self.starts.tobytes() + self.lengths.tobytes())
        return [self.cache.fingerprint, places.hexdigest()]

    def read(self) -> list[np.ndarray]:
        return np.split(self.cache.read_ranges(self.starts, self.lengths), np.cumsum(self.lengths)[:-1])


def _samples(data: Data, train: Mapping[str, Examples], num_tokens: int) -> Iterator[_Sample]:
    """Training sequences at equal distances: of each source as many as suit its weight, averaged over the stages."""
    shares = dict.fromkeys(train, 0.0)
    for stage in data.weights:
        for name in shares:
            shares[name] += stage.weights.get(name, 0.0) / sum(stage.weights.values()) / len(data.weights)
    for name, examples in train.items():
        share = shares[name] if data.weights else 1.0
        wanted = int(np.ceil(share * num_tokens / examples.seq_len))
        size = min(wanted, len(examples))
        starts = examples.starts(np.arange(size) * len(examples) // max(size, 1))
        lengths = np.minimum(examples.seq_len, examples.cache.num_tokens - starts)
        if size:
            yield _Sample(examples.cache, starts, lengths)
