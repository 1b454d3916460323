"""A model for your own Python programs: `jaxlm.load`."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxlm.core.sharding import replicated
from jaxlm.core.tree import num_parameters
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.base import FINAL, Inputs, LanguageModel
from jaxlm.models.inference.denoise import DenoisingConfig, denoised
from jaxlm.models.inference.generate import GenerationConfig, default_new_tokens, generate_tokens
from jaxlm.models.inference.padding import padded_length, program_rows
from jaxlm.models.inference.sampling import StopStrings
from jaxlm.models.inference.unstacked import Generator
from jaxlm.models.loss import token_losses
from jaxlm.optim.averaging import AS_TRAINED
from jaxlm.reading.decode import choice_name
from jaxlm.session.load_model import ARGUMENTS, Devices, LoadedModel, open_model

Text = str | Sequence[int]
"""A string, or token ids."""


class InferenceModel:
    """A model on the devices of this process, with its adapters merged.

    Attributes:
        loaded: where it comes from, its tokenizer and its plan.
        model: the parameters, in the compute dtype of `trainer.mp`.
    """

    def __init__(self, loaded: LoadedModel, model: LanguageModel):
        self.loaded = loaded
        self.model = model

    def __repr__(self) -> str:
        size = f"{num_parameters(self.model):,} parameters, vocabulary {self.model.Vocab.size:,}"
        kind = choice_name(type(self.loaded.model))
        return f"InferenceModel('{self.loaded.location}': {kind}, {size}, seq_len {self.loaded.model.seq_len:,})"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    def generate(
        self,
        prompts: str | Sequence[Text],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        denoising: DenoisingConfig | None = None,
    ) -> Any:
        """Continues prompts, as `jaxlm sample` does.

        Args:
            prompts: one string, or a list of strings or of token ids. A string begins with the BOS token if the training data
                did, or if the tokenizer of a Hugging Face folder adds it.
            max_new_tokens: None generates up to 128, or what fits after the longest prompt.
            temperature, top_k, top_p, seed, min_p, repetition_penalty: see `GenerationConfig`.
            stop: texts that end a continuation. They are not part of it.
            denoising: how a masked-diffusion model fills in the new tokens; None for the defaults.

        Returns:
            The continuation of the string, or a list with that of each prompt; without the prompt.

        Raises:
            ConfigError: a prompt is empty or has an id that is not in the vocabulary, prompt and new tokens do not fit into
                the model's `seq_len`, or an option is out of range.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        stop_ids = self.tokenizer.stop_ids  # raises without a tokenizer: the answers are texts
        if isinstance(stop, str) or "" in stop:
            raise ConfigError(f"generate: stop: {stop!r} given, but a list of texts that are not empty is expected")
        ids = [self.loaded.prompt_ids(p) if isinstance(p, str) else list(map(int, p)) for p in texts]
        filters: Any = {"min_p": min_p, "repetition_penalty": repetition_penalty}
        num_new = default_new_tokens(ids, self.model.Pos.size) if max_new_tokens is None else max_new_tokens
        config = GenerationConfig(num_new, temperature, top_k, top_p, seed, stop_ids, **filters)
        stops = StopStrings.of_text(stop, self.tokenizer.decode)
        with self.loaded.plan.layout.use():
            if self.model.is_causal and denoising is None:
                rows = generate_tokens(self._generator, ids, config, stops.until)
            else:
                rows = denoised(self.model, ids, config, self.tokenizer.mask_id, denoising)
            answers = [stops.before(new) for new in rows]
        return answers[0] if isinstance(prompts, str) else answers

    def logits(self, texts: Sequence[Text], *, batch_size: int = 8) -> list[np.ndarray]:
        """The logits after each token of each text: one float32 array [tokens, vocab] per text. See `hidden`."""
        return [arrays["logits"] for arrays in self._run("logits", texts, batch_size, _logits)]

    def log_probs(self, texts: Sequence[Text], *, batch_size: int = 8) -> list[np.ndarray]:
        """The log-probability of each token given those before it, in nats: one float32 array [tokens - 1] per text, because
        nothing is before the first token. See `hidden`.
        """
        if not self.model.is_causal:
            raise ConfigError(
                "log_probs: this model's tokens attend to later ones, so it does not predict the next one"
            )
        return [arrays["log_probs"][:-1] for arrays in self._run("log_probs", texts, batch_size, _log_probs)]

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
        _check_list("hidden", taps)
        read = functools.partial(_taps, taps=tuple(taps))
        states: dict[str, list[np.ndarray]] = {tap: [] for tap in taps}
        for arrays in self._run("hidden", texts, batch_size, read):
            for tap, array in arrays.items():
                states[tap].append(array)
        return states

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator.of(self.model)

    def _run(
        self, name: str, texts: Sequence[Text], batch_size: int, compute: Callable[..., dict[str, jax.Array]]
    ) -> Iterator[dict[str, np.ndarray]]:
        """For each text, what `compute` returns for its tokens. Args: name: of the caller, for messages."""
        check_at_least("batch_size", batch_size, 1)
        _check_list(name, texts)
        ids = [self._ids(f"{name}: text {number}", text) for number, text in enumerate(texts)]
        with self.loaded.plan.layout.use():
            for start in range(0, len(ids), batch_size):
                batch = ids[start : start + batch_size]
                inputs = _right_padded(batch, batch_size, self.model.Pos.size)
                columns = {key: np.asarray(array) for key, array in compute(self.model, inputs).items()}
                for row, text in enumerate(batch):
                    yield {key: column[row, : len(text)] for key, column in columns.items()}

    def _ids(self, where: str, text: Text) -> list[int]:
        vocab_size, seq_len = self.model.Vocab.size, self.model.Pos.size
        is_text = isinstance(text, str)
        ids = self.tokenizer.encode_like_transformers(text, add_special_tokens=True) if is_text else [*map(int, text)]
        if not 0 < len(ids) <= seq_len:
            raise ConfigError(f"{where} has {len(ids)} tokens. Expected 1 to {seq_len}, the model's seq_len")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ConfigError(f"{where} has ids from {min(ids)} to {max(ids)}. The vocabulary has {vocab_size} tokens")
        return ids


def _check_list(name: str, value: Sequence[Any]) -> None:
    if isinstance(value, str):
        raise ConfigError(f"{name}: the string {value!r:.40} given, but a list expected, such as ['...']")


def load(
    name: str | Path,
    *,
    weights: str = AS_TRAINED,
    adapter: str | None = None,
    keys: Mapping[str, Any] | None = None,
    devices: Devices = None,
) -> InferenceModel:
    """See `jaxlm.load`."""
    if devices is not None and not len(devices):
        raise ConfigError("devices: an empty list given, at least one device expected")
    loaded = open_model(str(name), keys or {}, adapter, weights, devices=devices, spelling=ARGUMENTS)
    with loaded.plan.layout.use():
        return InferenceModel(loaded, loaded.for_inference())


def _right_padded(batch: Sequence[Sequence[int]], batch_size: int, seq_len: int) -> Inputs:
    """The texts as rows of a few different lengths. Padding has segment id 0, which nothing attends to."""
    num_rows = program_rows(batch_size)
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
    return _everywhere({tap: state.rearrange((BATCH, POSITION, EMBED)).array for tap, state in states.items()})


@eqx.filter_jit
def _logits(model: LanguageModel, inputs: Inputs) -> dict[str, jax.Array]:
    """float32 [batch, position, vocab], on every device."""
    logits = model.logits(model.hidden(hax.auto_sharded(inputs)).final)
    return _everywhere({"logits": logits.rearrange((BATCH, POSITION, model.Vocab)).array})


@eqx.filter_jit
def _log_probs(model: LanguageModel, inputs: Inputs) -> dict[str, jax.Array]:
    """float32 [batch, position], the log-probability of the next token, on every device. The logits never exist in full."""
    inputs = hax.auto_sharded(inputs)
    following = hax.roll(inputs.tokens, -1, POSITION)
    losses = token_losses(model.hidden(inputs).final, model.lm_head(), following, soft_cap=model.traits.logit_soft_cap)
    return _everywhere({"log_probs": -losses.rearrange((BATCH, POSITION)).array})


def _everywhere(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return replicated({name: array.astype(jnp.float32) for name, array in arrays.items()})
