"""A reference in Hugging Face format: a folder, or a repository of the Hub."""

import functools
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from pathlib import Path

import jax
from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first
from jaxlm.core.safe_io import sha256
from jaxlm.core.sharding import Layout
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from jaxlm.interop.hf.folder import PretrainedModel, ReadOptions, load_model, open_folder
from jaxlm.interop.hf.hub import local_folder
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.plan.refs.base import Log, Ref, RefConfig
from jaxlm.reading.choices import choice


@choice(RefConfig, "hf")
class HfRefConfig(RefConfig):
    """A folder with config.json and weights (safetensors or torch files), or a Hub `name` or `name@revision`.

    Attributes:
        weight_names: rename tensors of weights from another program, as in `hf_weight_names`.
        skip_keys: keys of its config.json to read as if they were not there, as in `hf_skip_keys`.
    """

    weight_names: dict[str, str] = field(default_factory=dict)
    skip_keys: list[str] = field(default_factory=list)

    def open(self, key: str) -> Ref:
        return _HfRef(self, key)


class _HfRef(Ref[HfRefConfig]):
    def abstract(self, Vocab: Axis) -> LanguageModel:
        opened = self._opened
        if opened.vocab_size < Vocab.size:
            raise ConfigError(
                f"{self.key}.path: the model in {self.location} has a vocabulary of {opened.vocab_size:,} tokens, but the"
                f" tokenizer of this run has {Vocab.size:,}. Set data.tokenizer to the tokenizer of the model"
            )

        def build() -> LanguageModel:
            # The key is made while tracing: a forecast's devices cannot run anything.
            return self.precision.cast_to_params(opened.config.build(Vocab, key=jax.random.key(0)))

        return jax.eval_shape(build)

    def model_config(self) -> ModelConfig:
        return self._opened.config

    def load(self, Vocab: Axis, layout: Layout, log: Log) -> LanguageModel:
        folder = self._with_weights
        log(f"{self.key}: {folder}")
        options = replace(self._options, rules=self.config.weight_names, log=log)
        return load_model(folder, self.abstract(Vocab), self._opened.config, layout, options)

    def notes(self) -> Sequence[str]:
        return () if self.config.weight_names else self._opened.notes

    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(str(self._folder)) if (self._folder / "tokenizer.json").is_file() else None

    def identity(self) -> dict[str, str]:
        folder = self._with_weights
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
        with ThreadPoolExecutor() as pool:
            weights = "".join(pool.map(sha256, files))
        rules = json.dumps(self.config.weight_names)
        skipped = json.dumps(self.config.skip_keys) if self.config.skip_keys else ""
        return {
            "config": sha256(folder / "config.json") + skipped,
            "weights": hashlib.sha256((weights + rules).encode()).hexdigest(),
            "dtype": self.config.dtype,
        }

    @functools.cached_property
    def _folder(self) -> Path:
        return main_first(lambda: local_folder(self.config.path, f"{self.key}.path", weights=False))

    @functools.cached_property
    def _with_weights(self) -> Path:
        return main_first(lambda: local_folder(self.config.path, f"{self.key}.path", weights=True))

    @functools.cached_property
    def _opened(self) -> PretrainedModel:
        return open_folder(self._folder, self._options)

    @property
    def _options(self) -> ReadOptions:
        return ReadOptions(skip_keys=self.config.skip_keys, skipped_by=f"{self.key}.skip_keys")
