"""nanochat's depth dial: one number, the depth, sets the model, the batch, the number of steps and all rates.

Source: karpathy/nanochat (`scripts/base_train.py`, commit b7629ef). Batch: Bergsma et al. 2025, Power Lines
(arXiv:2505.13738), whose optimum grows as D^0.383 with the training tokens D.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import LearningRate, NonNegativeFloat, PositiveFloat, PositiveInt
from jaxlm.data.config import TRAIN_BPE
from jaxlm.data.tokenizer.tokenizer import open_tokenizer
from jaxlm.plan.presets.base import Derivation, DerivedNumber, PresetConfig, RunSize, given_at
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import config_error, decode
from jaxlm.reading.yaml import ConfigSource, merge
from jaxlm.systems.nanochat.model import (
    NanoConfig,
    nanochat_flops_per_token,
    num_lookup_entries,
    padded_vocab_size,
    parameter_counts,
)
from jaxlm.systems.nanochat.rates import BASE_TRAIN, RECIPES, REFERENCE_BATCH, OptimizerKeys, Recipe

_REFERENCE_DEPTH = 12
_BATCH_EXPONENT = 0.383
_SEQ_LEN = 2048
_VOCAB_SIZE = 32_768
_SIZES = ("num_layers", "hidden_dim", "num_heads", "num_kv_heads")
_POWER_LINES = "arXiv:2505.13738"
Depth = Annotated[int, Interval(ge=1, le=1024)]


@choice(PresetConfig, "depth_dial", role="default")
class DepthDialConfig(PresetConfig):
    """Fills in `model`, `optimizer`, `data.vocab_size`, and the length and batch of `trainer`.

    Attributes:
        depth: number of layers, from which everything else follows.
        recipe: `seed` is nanochat of February 2026, `head` of July 2026.
        aspect_ratio: width of the model per layer.
        head_dim: size of an attention head. The width is rounded up to a multiple of it.
        num_iterations: number of steps. Takes precedence over `target_flops`.
        target_flops: train for as many steps as these FLOPs allow. Takes precedence over `target_param_data_ratio`.
        target_param_data_ratio: training tokens per scaling parameter (matrices of the layers, and the head). Batch and
            weight decay follow it even if another key sets the number of steps. Null is 10.5 for `seed`, 12 for `head`.
        total_batch_size: tokens per step. Null derives it from the training tokens, as a power of two.
        device_batch_size: most sequences that a device processes at once. More are divided into equal microbatches.
        embedding_lr: learning rate of the token embedding and of the value embeddings, at a batch of 524,288 tokens and a
            width of 768. Null is 0.3.
        unembedding_lr: the same for the output head. Null is 0.004 for `seed`, 0.008 for `head`.
        matrix_lr: learning rate of Muon at a batch of 524,288 tokens. Null is 0.02.
        lookup_lr: learning rate of the tables of lookup layers, at the same batch and width. Null is `embedding_lr`. The
            layers themselves are in `model.lookup`.
        scalar_lr: learning rate of the factors of each layer's inputs at a batch of 524,288 tokens. Null is 0.5.
        weight_decay: weight decay of Muon at a batch of 524,288 tokens and the training tokens of depth 12. Null is 0.2 for
            `seed`, 0.28 for `head`.
    """

    depth: Depth
    recipe: Literal["seed", "head"] = "head"
    aspect_ratio: PositiveInt = 64
    head_dim: PositiveInt = 128
    num_iterations: PositiveInt | None = None
    target_flops: PositiveFloat | None = None
    target_param_data_ratio: PositiveFloat | None = None
    total_batch_size: PositiveInt | None = None
    device_batch_size: PositiveInt = 32
    embedding_lr: LearningRate | None = None
    unembedding_lr: LearningRate | None = None
    matrix_lr: LearningRate | None = None
    lookup_lr: LearningRate | None = None
    scalar_lr: LearningRate | None = None
    weight_decay: NonNegativeFloat | None = None

    def derive(self, source: ConfigSource) -> Derivation:
        return _Dial(self, RECIPES[self.recipe], source).derive()


@dataclass(frozen=True)
class _ModelSection:
    model: NanoConfig


@dataclass(frozen=True)
class _Batch:
    """Tokens per step, and what the learning rates are multiplied by for them."""

    tokens: int
    rate_scale: float


class _Dial:
    """One derivation. Each step adds the numbers that it works out."""

    def __init__(self, dial: DepthDialConfig, recipe: Recipe, source: ConfigSource):
        self._dial, self._recipe, self._source = dial, recipe, source
        self._numbers: list[DerivedNumber] = []
        self._seq_len = _integer(self._value("model.seq_len"), _SEQ_LEN)

    def derive(self) -> Derivation:
        self._check()
        self._add("recipe", f"{self._dial.recipe}, depth {self._dial.depth}", self._recipe.revision, "")
        vocab_size = self._vocab_size()
        keys = self._model_keys()
        model = self._with_lookup(keys, self._model(keys, self._value("model")), vocab_size)
        num_parameters = self._count(model, vocab_size)
        flops = nanochat_flops_per_token(model, vocab_size)
        keys_seen = sum(min(back, model.seq_len) for back in model.window_distances)
        self._add(
            "windows",
            model.window_pattern,
            f"over the layers; S sees {min(model.window_distances):,} tokens back, L and the last layer all",
            "gpt.py",
        )
        self._add(
            "FLOPs per token",
            flops,
            f"6 x weights in products + 12 x {model.hidden_dim} x {keys_seen:,} (all windows)"
            + ("" if model.lookup is None else " + the forward pass of the lookup layers, which nanochat counts twice"),
        )
        reference = self._model(self._sizes_at(_REFERENCE_DEPTH), self._without_sizes())
        target, reference_tokens = self._target_tokens(num_parameters, parameter_counts(reference, vocab_size).scaling)
        batch = self._batch(target, reference_tokens)
        num_steps = self._num_steps(flops, target, batch)
        tokens = num_steps * batch.tokens
        self._add("training tokens", tokens, f"{num_steps:,} steps x {batch.tokens:,}")
        self._add("tokens per scaling parameter", tokens / num_parameters, "training tokens / scaling parameters")
        self._add("training FLOPs", flops * tokens, "FLOPs per token x training tokens")
        optimizer = self._optimizer_keys(model, batch, target, reference_tokens, num_steps)
        trainer = self._trainer_keys(batch.tokens // self._seq_len)
        return Derivation(
            {
                "data": {"vocab_size": vocab_size},
                "model": keys,
                "optimizer": optimizer,
                "trainer": trainer | {"num_train_steps": num_steps},
            },
            tuple(self._numbers),
            RunSize(num_parameters, flops, num_steps, tokens),
        )

    def _check(self) -> None:
        if self._value("model.type") not in (None, "nano"):
            raise self._error(
                "model.type",
                f"'{self._value('model.type')}' given, but the preset depth_dial is for type nano. Remove one of them",
            )
        for key in ("use_hf_model_config", "epoch"):
            if self._value(key):
                raise self._error(key, "given with the preset depth_dial, which sets the same. Remove one of them")
        if self._dial.lookup_lr is not None and not isinstance(self._value("model.lookup"), Mapping):
            raise self._error(
                "preset.lookup_lr", "given, but the model has no lookup layers. Remove it, or set model.lookup"
            )
        if self._dial.head_dim % 2:
            raise self._error(
                "preset.head_dim",
                f"{self._dial.head_dim} given, an even number expected: features are rotated in pairs",
            )

    def _value(self, path: str) -> Any:
        return given_at(self._source.tree, path.split("."))

    def _error(self, path: str, problem: str) -> ConfigError:
        return config_error(self._source, tuple(path.split(".")), problem)

    def _add(
        self,
        name: str,
        value: Any,
        formula: str,
        source: str = BASE_TRAIN,
        key: str | None = None,
        instead: str = "",
    ) -> Any:
        self._numbers.append(DerivedNumber(name, value, formula, source, key, instead))
        return value

    def _vocab_size(self) -> int:
        tokenizer, vocab_size = self._value("data.tokenizer"), self._value("data.vocab_size")
        added = self._value("data.added_tokens") or ()
        if isinstance(vocab_size, int):
            return self._add("vocabulary", vocab_size, "data.vocab_size", "")
        if isinstance(tokenizer, str) and tokenizer != TRAIN_BPE:
            size, why = open_tokenizer(tokenizer, added, None).vocab_size, f"tokens of {tokenizer}"
        else:
            size, why = _VOCAB_SIZE, "nanochat's, for a tokenizer that is trained"
        return self._add("vocabulary", size, why, "", "data.vocab_size")

    def _sizes_at(self, depth: int) -> dict[str, Any]:
        base, head_dim = depth * self._dial.aspect_ratio, self._dial.head_dim
        num_heads = -(-base // head_dim)
        sizes = {"num_layers": depth, "hidden_dim": num_heads * head_dim, "num_heads": num_heads}
        fixed = {"type": "nano", "seq_len": self._seq_len, "window_pattern": "SSSL", "num_kv_heads": None}
        return {**fixed, **sizes, **self._recipe.model}

    def _model_keys(self) -> dict[str, Any]:
        dial, keys = self._dial, self._sizes_at(self._dial.depth)
        rule = f"{dial.depth} x {dial.aspect_ratio}, rounded up to a multiple of {dial.head_dim}"
        width = _integer(self._value("model.hidden_dim"), keys["hidden_dim"])
        if width % dial.head_dim and self._value("model.num_heads") is None:
            raise self._error(
                "model.hidden_dim",
                f"{width} given, but preset.head_dim ({dial.head_dim}) does not divide it. Set one of them, such as"
                f" model.hidden_dim: {-(-width // dial.head_dim) * dial.head_dim}",
            )
        keys["num_heads"] = width // dial.head_dim
        if isinstance(lookup := self._value("model.lookup"), Mapping):
            unused = ("sample_tokens",) if lookup.get("allocation") == "uniform" else ()
            keys["lookup"] = {key: value for key, value in self._recipe.lookup.items() if key not in unused}
        self._add("layers", keys["num_layers"], "depth", key="model.num_layers")
        self._add("width", keys["hidden_dim"], rule, key="model.hidden_dim")
        self._add("heads", keys["num_heads"], f"{width:,} / {dial.head_dim}", key="model.num_heads")
        return keys

    def _without_sizes(self) -> Any:
        section = self._value("model")
        omitted_keys = (*_SIZES, "lookup")  # nanochat's reference has no lookup layers
        return {k: v for k, v in section.items() if k not in omitted_keys} if isinstance(section, Mapping) else section

    def _with_lookup(self, keys: dict[str, Any], model: NanoConfig, vocab_size: int) -> NanoConfig:
        """The model with the number of entries of its lookup layers, if it has any; the same number in `keys`."""
        if model.lookup is None:
            return model
        derived = self._add(
            "entries of a lookup layer",
            num_lookup_entries(replace(model, lookup=replace(model.lookup, num_entries=None)), vocab_size),
            "parameters with an entry for each token / 1,000, at least the vocabulary",
            key="model.lookup.num_entries",
        )
        keys["lookup"]["num_entries"] = derived
        return replace(model, lookup=replace(model.lookup, num_entries=_or(model.lookup.num_entries, derived)))

    def _model(self, keys: dict[str, Any], overrides: Any) -> NanoConfig:
        """The model of these keys, under those that you write."""
        section = merge(keys, overrides) if isinstance(overrides, Mapping) else keys
        model = decode(_ModelSection, ConfigSource({"model": section}, self._source.marks)).model
        model.check()
        return model

    def _count(self, model: NanoConfig, vocab_size: int) -> int:
        counts = parameter_counts(model, vocab_size)
        rows, multiple = padded_vocab_size(model, vocab_size), model.pad_vocab_to_multiple_of or 1
        self._add(
            "vocabulary, padded",
            rows,
            f"{vocab_size:,} rounded up to a multiple of {multiple}",
            "gpt.py",
        )
        by_group = {item.name: count for item in fields(counts) if (count := getattr(counts, item.name))}
        self._add("parameters", {**by_group, "total": counts.total}, "sizes of the arrays", "gpt.py")
        return self._add("scaling parameters", counts.scaling, "transformer_matrices + lm_head")

    def _target_tokens(self, num_parameters: int, num_reference: int) -> tuple[int, float]:
        """The training tokens that suit the model, and those that suit the reference."""
        ratio = _or(self._dial.target_param_data_ratio, self._recipe.target_param_data_ratio)
        target, reference = int(ratio * num_parameters), ratio * num_reference
        if not target:
            raise self._error(
                "preset.target_param_data_ratio",
                f"{ratio:g} given, which is less than one token for {num_parameters:,} scaling parameters. Raise it",
            )
        self._add("target tokens D", target, f"{ratio:g} x scaling parameters")
        self._add("reference tokens D_ref", reference, f"{ratio:g} x {num_reference:,} (depth {_REFERENCE_DEPTH})")
        return target, reference

    def _batch(self, target: int, reference: float) -> _Batch:
        predicted = REFERENCE_BATCH * (target / reference) ** _BATCH_EXPONENT
        self._add("predicted batch", predicted, f"{REFERENCE_BATCH:,} x (D / D_ref)^{_BATCH_EXPONENT}", _POWER_LINES)
        total_batch_size = self._dial.total_batch_size
        if total_batch_size is not None and total_batch_size % self._seq_len:
            raise self._error(
                "preset.total_batch_size",
                f"{total_batch_size} tokens given, a multiple of model.seq_len ({self._seq_len}) expected. Set it to"
                f" {max(1, total_batch_size // self._seq_len) * self._seq_len}",
            )
        power = round(math.log2(predicted))
        what = (
            f"2^{power} tokens, nearest to the predicted batch,"
            if total_batch_size is None
            else "preset.total_batch_size"
        )
        size = self._sequences(total_batch_size or 2**power, what)
        tokens = self._add("batch in tokens B", size * self._seq_len, f"{size:,} x {self._seq_len:,}")
        scale = 1.0 if tokens == REFERENCE_BATCH else (tokens / REFERENCE_BATCH) ** 0.5
        self._add("scale of learning rates", scale, f"sqrt(B / {REFERENCE_BATCH:,})")
        return _Batch(tokens, scale)

    def _sequences(self, tokens: int, what: str) -> int:
        """The sequences per step, which `trainer.train_batch_size` may say."""
        derived = max(1, round(tokens / self._seq_len))
        self._add("batch in sequences", derived, f"{what} / {self._seq_len:,}", key="trainer.train_batch_size")
        batch_size = self._value("trainer.train_batch_size")
        if batch_size is None:
            return derived
        if type(batch_size) is not int or batch_size < 1:
            raise self._error(
                "trainer.train_batch_size",
                f"{batch_size!r} given, but the preset scales learning rates by one batch size. Give a number,"
                " or remove it",
            )
        return batch_size

    def _num_steps(self, flops: int, target: int, batch: _Batch) -> int:
        dial = self._dial
        if dial.num_iterations is not None:
            steps, formula = dial.num_iterations, "preset.num_iterations"
        elif dial.target_flops is not None:
            steps = round(dial.target_flops / (flops * batch.tokens))
            formula = f"{dial.target_flops:g} FLOPs / (FLOPs per token x B)"
        else:
            steps, formula = target // batch.tokens, "D / B, rounded down"
        num_train_steps = self._value("trainer.num_train_steps")
        if not steps and type(num_train_steps) is not int:
            raise self._error(
                "preset.target_flops" if dial.target_flops else "preset",
                f"the run has no steps: one step is {batch.tokens:,} tokens and {flops * batch.tokens:.3g} FLOPs, but"
                f" {formula} = 0. Raise target_flops or target_param_data_ratio, lower total_batch_size, or set"
                " num_iterations",
            )
        self._add("steps N", steps, formula, key="trainer.num_train_steps")
        return num_train_steps if type(num_train_steps) is int else steps

    def _optimizer_keys(
        self, model: NanoConfig, batch: _Batch, target: int, reference: float, num_steps: int
    ) -> dict[str, Any]:
        names = ("embedding_lr", "unembedding_lr", "matrix_lr", "lookup_lr", "scalar_lr", "weight_decay")
        overrides = {name: getattr(self._dial, name) for name in names if getattr(self._dial, name) is not None}
        optimizer_type = self._value("optimizer.type")
        if optimizer_type not in (None, "muon"):
            unused = f"; {', '.join(f'preset.{name}' for name in overrides)}: not used" if overrides else ""
            self._add("optimizer", optimizer_type, f"your choice: nothing of its section is filled in{unused}", "")
            return {}
        if "embedding_lr" in overrides:
            overrides.setdefault("lookup_lr", overrides["embedding_lr"])
        section, recipe = self._value("optimizer"), replace(self._recipe, **overrides)
        optimizer_keys = section if isinstance(section, Mapping) else {}
        derived = OptimizerKeys(self._add, recipe, model, batch.rate_scale, num_steps, optimizer_keys)
        return derived.keys(math.sqrt(batch.tokens / REFERENCE_BATCH), reference / target)

    def _trainer_keys(self, size: int) -> dict[str, Any]:
        keys = {"train_batch_size": size, "allow_nondivisible_batch_size": True}
        per_device = [self._value(f"trainer.per_device_{name}parallelism") for name in ("", "train_")]
        if all(value in (None, -1) for value in per_device):
            limit = self._dial.device_batch_size
            key = "trainer.max_per_device_parallelism"
            keys["max_per_device_parallelism"] = self._add("microbatch", limit, "preset.device_batch_size", key=key)
        return keys


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _integer(value: Any, default: int) -> int:
    """A number above 0 as it is given. What is none is refused where its section is decoded."""
    return value if type(value) is int and value > 0 else default
