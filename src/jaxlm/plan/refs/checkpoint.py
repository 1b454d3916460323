"""A reference in a checkpoint of another run."""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first
from jaxlm.core.sharding import Layout
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.engine.checkpoint.manifest import CHECKSUMS
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint, latest_complete, resolve_checkpoints, restore
from jaxlm.engine.checkpoint.store import ARRAYS
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, shardings
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.optim.averaging import AS_TRAINED
from jaxlm.plan.load_config import read_saved
from jaxlm.plan.plan import saved_models
from jaxlm.plan.refs.base import Log, Ref, RefConfig
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, merge_surgeries


@choice(RefConfig, "checkpoint")
class CheckpointRefConfig(RefConfig):
    """A checkpoint of another run (`checkpoints/<id>/step-N`), or a run's checkpoint folder, of which the newest is used.

    Attributes:
        weights: `trained` for the newest weights, or `ema` for their average (`trainer.model_averaging`).
    """

    weights: str = AS_TRAINED

    def open(self, key: str) -> Ref:
        return _CheckpointRef(self, key)


@dataclass(frozen=True)
class _Saved:
    """The content of a checkpoint, without its arrays."""

    checkpoint: VerifiedCheckpoint
    tokenizer: Tokenizer
    phase: Phase
    surgeries: tuple[SurgeryConfig, ...]
    state: RunState


class _CheckpointRef(Ref[CheckpointRefConfig]):
    def abstract(self, Vocab: Axis) -> LanguageModel:
        num_tokens = self._saved.tokenizer.vocab_size
        if num_tokens != Vocab.size:
            raise ConfigError(
                f"{self.key}.path: the model in {self.location} has a vocabulary of {num_tokens:,} tokens, but the tokenizer"
                f" of this run has {Vocab.size:,}. Set data.tokenizer to {self._saved.checkpoint.location}/run/tokenizer"
            )
        return jax.eval_shape(lambda model: self.precision.cast_to_params(self._merged(model)), self._saved.state.model)

    def model_config(self) -> ModelConfig:
        return self._saved.phase.model

    def notes(self) -> Sequence[str]:
        return ()

    def load(self, Vocab: Axis, layout: Layout, log: Log) -> LanguageModel:
        saved, abstract = self._saved, self.abstract(Vocab)
        log(f"{self.key}: {saved.checkpoint.location}")
        cast = lambda tree: jax.eval_shape(self.precision.cast_to_params, tree)  # noqa: E731
        model = restore(saved.checkpoint, cast(saved.state.model), layout, prefix="model", cast=True, log=log)
        if self.config.weights != AS_TRAINED:
            prefix = f"slots.{self.config.weights}.weights"
            average = cast(saved.state.slots[self.config.weights].weights)
            average = restore(saved.checkpoint, average, layout, prefix=prefix, cast=True, log=log)
            model = saved.phase.with_average(model, average)
        return jax.jit(self._merged, out_shardings=shardings(abstract, layout), donate_argnums=0)(model)

    def _merged(self, model: LanguageModel) -> LanguageModel:
        return merge_surgeries(model, self._saved.surgeries)

    def tokenizer(self) -> Tokenizer | None:
        return self._saved.tokenizer

    def identity(self) -> dict[str, str]:
        """The digests come from the checkpoint's checksums, so no array is read."""
        read = self._saved.checkpoint.checkpoint.read
        arrays = {name: sum_ for name, sum_ in json.loads(read(CHECKSUMS)).items() if name.startswith(f"{ARRAYS}/")}
        return {
            "config": hashlib.sha256(read("run/manifest.json")).hexdigest(),
            "weights": hashlib.sha256(json.dumps([arrays, self.config.weights]).encode()).hexdigest(),
            "dtype": self.config.dtype,
        }

    @functools.cached_property
    def _saved(self) -> _Saved:
        path = self.config.path
        staging = Path(CheckpointerConfig.staging_dir)
        candidates = main_first(lambda: resolve_checkpoints(path, staging, of_runs=False))
        if not candidates:
            raise ConfigError(
                f"{self.key}.path: no checkpoint at {path}. Set it to a checkpoint (step-N) or a run's checkpoint folder"
            )
        checkpoint = latest_complete(candidates, path, print)
        with checkpoint.checkpoint.local("run") as folder:
            tokenizer = load_tokenizer(str(folder / "tokenizer"), of_run=True)
            config = read_saved(folder / "config.yaml")
        builder = saved_models(config, tokenizer.vocab_size, self.precision)
        phase = builder.phases[checkpoint.cursor.phase]
        known = (AS_TRAINED, *phase.averages)
        if self.config.weights not in known:
            raise ConfigError(
                f"{self.key}.weights: '{self.config.weights}' given, but {checkpoint.location} only has: {', '.join(known)}"
            )
        surgeries = builder.surgeries_until(phase)
        return _Saved(checkpoint, tokenizer, phase, surgeries, builder.abstract_state(phase))
