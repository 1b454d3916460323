"""LoRA and DoRA: low-rank adapters on linear layers and embeddings.

Source: Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models (arXiv:2106.09685), section 4.1:
W x + (alpha / r) B A x, with A random and B zero, so that the adapted model initially equals the base model.
Kalajdzievski 2023 (arXiv:2312.03732): alpha / sqrt(r) keeps the size of the update independent of the rank (`rslora`).
Dropout on the input of A in training, as in the released code (microsoft/LoRA, `loralib/layers.py`) and in PEFT.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LORA, VOCAB, axes_of
from jaxlm.core.errors import ConfigError, listed, within
from jaxlm.core.field_types import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveInt
from jaxlm.core.products.stored_weights import StoredWeight
from jaxlm.core.publish import Location
from jaxlm.core.rules import Rules, excludes, only
from jaxlm.core.runtime import main_first
from jaxlm.core.sharding import Layout
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.text_part import TEXT_ALONE, Modules
from jaxlm.interop.peft.names import AxisSizes, BaseRows
from jaxlm.interop.peft.read import ReadAdapters, lora_keys, peft_folder, read_adapters
from jaxlm.interop.peft.write import Adapted, Adapter, save_adapters
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig
from jaxlm.models.decoders.mtp import MTP
from jaxlm.models.layers import Embedding
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.models.stack_paths import NumberedPaths, path_before_splits
from jaxlm.models.stacks import Body
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants
from jaxlm.surgery.input_moments import InputMoments, input_moments
from jaxlm.surgery.lora_layers import (
    SPLITS_WEIGHT,
    AdapterSize,
    Init,
    LoraEmbedding,
    LoraExperts,
    LoraLinear,
    LowRank,
    UntiedEmbedding,
    eva,
    head_of,
    names_of,
    table_names,
    tied_table,
)

_CALIBRATION_BATCHES = 8
_ADAPTER_LEAVES = ("a", "b", "magnitude", "layer", "initial_a", "initial_b")


@choice(SurgeryConfig, "lora")
class LoraConfig(SurgeryConfig):
    """Adds LoRA or DoRA adapters to the linear layers whose path matches. Train only the adapters with
    `trainable: ["\\\\.[ab]$"]`; with DoRA, `["\\\\.(a|b|magnitude)$"]`.

    Patterns by layer are searched for in paths with the number of the layer, such as `body.layers.3.attn.q_proj`.

    Attributes:
        target: regular expression searched for in the paths of linear layers; matching layers get an adapter. Null adapts no
            linear layers. The layer `mtp`, which transformers does not have, gets none.
        rank: rank of the adapters.
        alpha: adapter outputs are scaled by alpha / rank.
        dropout: dropout probability of the inputs of linear layers' adapters in training.
        rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
        use_dora: also train a magnitude for each output, which the adapted weight is normalized to (DoRA).
        rank_pattern: regular expression -> rank of the adapters whose numbered path it matches; the first one decides. Rank 0
            means no adapter.
        alpha_pattern: regular expression -> alpha, likewise.
        layers_to_transform: numbers of the layers that get adapters, from 0; null means all. Does not affect the head.
        embeddings: regular expression searched for in the paths of embedding tables (`tokens`), and in `head` if the head is
            tied to one; matching ones get an adapter. Null adapts none.
        experts: regular expression searched for in the paths of the linear layers of experts (`mlp.gate_proj`); each expert
            gets an adapter of its own in matching ones. Null adapts none.
        ensure_weight_tying: the head that is tied to the token embedding has the adapter of that embedding too, so that they
            stay tied.
        modules_to_save: regular expressions searched for in the paths of other parameters (`^head\\.weight$`, `\\.bias$`);
            `--adapters only` writes matching ones too. `trainable` decides whether they train.
        init: how the adapters of linear layers start; `init_lora_weights` in PEFT. `default` (`true` there): A is random and
            B zero. `pissa` moves the largest singular values of the weight into the adapter, and `olora` the first rows of
            its QR decomposition; the weight keeps the rest. `eva`: A has the principal components of the layer's inputs in
            the first batches of the phase, and B is zero. None of them changes the model's outputs.
        calibration_batches: number of batches that `eva` measures; null means 8. Padding does not count.
        existing: what happens to a matching linear layer that has an adapter already. `refuse` does not start the run; `keep`
            leaves it as it is, so that only layers without one get one; `merge` adds it to the weight of the layer, which
            gets a new one (ReLoRA, arXiv:2307.05695).
        cap_rank: lower ranks to half of the smaller side of the adapted matrix, and at least to 1.
        from_peft: load initial adapters from a folder saved by PEFT, or from a Hub `name` or `name@revision`. The other keys
            default to the values in that folder. Null starts with new adapters that do not change the model's outputs.
    """

    target: str | None = ".*"
    rank: PositiveInt = 8
    alpha: NonNegativeFloat = 16.0
    dropout: BelowOne = 0.0
    rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, NonNegativeInt] = field(default_factory=dict)
    alpha_pattern: dict[str, NonNegativeFloat] = field(default_factory=dict)
    layers_to_transform: list[NonNegativeInt] | None = None
    embeddings: str | None = None
    experts: str | None = None
    ensure_weight_tying: bool = False
    modules_to_save: list[str] = field(default_factory=list)
    init: Init = "default"
    calibration_batches: PositiveInt | None = None
    existing: Literal["refuse", "keep", "merge"] = "refuse"
    cap_rank: bool = False
    from_peft: str | None = None

    key_rules: ClassVar[Rules] = (
        excludes(
            *("from_peft", "embeddings", "experts"),
            when="existing",
            is_=("keep", "merge"),
            why="which takes a surgery of its own",
        ),
        excludes("existing", when="init", is_="eva", why="which measures layers without adapters"),
        only("calibration_batches", when="init", is_="eva"),
        excludes("init", "from_peft", why="whose adapters have started already"),
        excludes("init", "embeddings", why="whose tables start as usual"),
        excludes("init", "experts", why="whose adapters start as usual"),
        excludes("dropout", "experts", why="whose adapters PEFT opens only without"),
        excludes("use_dora", "experts", why="whose adapters have no magnitudes"),
    )

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        if self.target is None and self.embeddings is None and self.experts is None:
            raise ConfigError(
                "surgery lora: target, embeddings and experts are null, so nothing gets an adapter. Set one of them"
            )
        for name in ("rank_pattern", "alpha_pattern", "modules_to_save"):
            for pattern in getattr(self, name):
                tree.compile_pattern(pattern, f"surgery lora: {name}")
        if self.existing == "merge":
            model = self._with_existing(model, lambda layer: layer.merged())
        indices, names = itertools.count(), NumberedPaths(model)
        has_adapter = {f"{path}.base" for path, _ in tree.modules_by_path(model, LoraLinear)}

        def adapt(path: str, layer: Linear) -> LoraLinear | Linear:
            layer_key = jax.random.fold_in(key, next(indices))
            if path in has_adapter:  # `keep`
                return layer
            sizes = self._sizes(names.numbered(path, layer.weight), _largest(layer) if self.cap_rank else None)
            if not any(size.rank for size in sizes):
                return layer
            self._check_init_of(path, layer, sizes)
            options = {"dropout": self.dropout, "use_dora": self.use_dora, "init": self.init}
            return LoraLinear.sized(layer, sizes, key=layer_key, **options)

        def adapt_experts(path: str, layer: ExpertLinear) -> LoraExperts | ExpertLinear:
            layer_key = jax.random.fold_in(key, next(indices))
            sizes = self._sizes(names.numbered(path, layer.weight), _largest(layer) if self.cap_rank else None)
            return LoraExperts.sized(layer, sizes, key=layer_key) if any(size.rank for size in sizes) else layer

        adapted = model
        if self.target is not None:
            adapted = tree.map_modules_by_path(model, Linear, self.target, adapt, "surgery lora: target")
        if self.experts is not None:
            args = self.experts, adapt_experts, "surgery lora: experts"
            adapted = tree.map_modules_by_path(adapted, ExpertLinear, *args)
        if self.existing == "refuse":
            self._check_no_adapters(model)
        elif tree.num_parameters(adapted) == tree.num_parameters(model):
            raise ConfigError(
                f"surgery lora: existing: keep given, but all layers that target '{self.target}' matches have adapters"
                " already. Remove the surgery"
            )
        if self.embeddings is not None:
            adapted = self._adapt_tables(adapted, jax.random.fold_in(key, next(indices)))
        self._check_keys(adapted, names, [name for name in table_names(model) if self._matches_table(name)])
        if not _adapter_paths(adapted, self):
            raise ConfigError(
                "surgery lora: rank_pattern: gives rank 0 to all matching layers, so nothing gets an adapter. Change it"
            )
        self._check_dropout_applies(adapted)
        return adapted

    def moved(self, moments: Any, sums: Any) -> Any:
        if self.existing != "merge":
            return moments
        return self._with_existing(moments, lambda layer: layer.base)

    @property
    def wants(self) -> Wants:
        num_batches = (self.calibration_batches or _CALIBRATION_BATCHES) if self.init == "eva" else 0
        return Wants(num_batches=num_batches, measure=self.measure, leaves=self._initial_leaves)

    def measure(self, model: LanguageModel, batch: TokenBatch) -> dict[str, InputMoments]:
        names, target = NumberedPaths(model), self.target
        assert target is not None, "init has been checked"
        layers = [(path, layer) for path, layer in tree.modules_by_path(model, Linear) if re.search(target, path)]
        paths = [p for p, layer in layers if any(s.rank for s in self._sizes(names.numbered(p, layer.weight)))]
        with within("surgery lora: init: eva: target"):
            return input_moments(model, paths, Inputs.of(batch))

    def fill(
        self, model: LanguageModel, before: LanguageModel, *, sums: Mapping[str, InputMoments], **_: Any
    ) -> LanguageModel:
        def filled(path: str, layer: LoraLinear) -> LoraLinear:
            return dataclasses.replace(layer, a=eva(layer.change, sums[path]).a) if path in sums else layer

        return tree.map_modules_by_path(model, LoraLinear, ".*", filled)

    def merge(self, model: LanguageModel) -> LanguageModel:
        # The paths may have changed since, and merging some earlier than others changes nothing.
        for kind in (LoraLinear, LoraExperts):
            if tree.modules(model, kind):
                model = tree.map_modules(model, kind, ".*", lambda layer: layer.merged())
        if self.embeddings is None:
            return model
        adapts = lambda path: any(map(self._matches_table, (path, head_of(path))))  # noqa: E731
        change = lambda path, table: table.merged() if adapts(path) else table  # noqa: E731
        return tree.map_modules_by_path(model, LoraEmbedding, ".*", change)

    def exported(self, model: LanguageModel, merged: LanguageModel) -> LanguageModel:
        if tree.modules(merged, UntiedEmbedding):
            raise ConfigError(
                "surgery lora: embeddings: the adapters make the token embedding and the head that is tied to it differ,"
                " which the config.json of this model cannot say. Write the adapters (--adapters only), or train with"
                " ensure_weight_tying: true"
            )
        return merged

    def _initial_leaves(self, model: LanguageModel, config: ModelConfig) -> Mapping[str, np.ndarray | jax.Array]:
        if self.from_peft is None:
            return {}
        folder = main_first(functools.partial(peft_folder, self.from_peft))
        read = _read(folder, model, config)
        self._check_agreement(read, _adapter_paths(model, self))
        return read.leaves(model)

    def keys_from_files(self, keys: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
        missing = {field.name for field in dataclasses.fields(self)}.difference(keys)
        if self.from_peft is None or not missing:
            return {}
        return {key: value for key, value in lora_keys(peft_folder(self.from_peft), config).items() if key in missing}

    def _with_existing(self, model: LanguageModel, change: Callable[[LoraLinear], Linear]) -> LanguageModel:
        """The model with other layers in place of the matching ones that have adapters."""
        target = tree.compile_pattern(self.target or ".*", "surgery lora: target")
        paths = [path for path, _ in tree.modules_by_path(model, LoraLinear) if target.search(path)]
        if not paths:
            raise ConfigError(
                f"surgery lora: existing: merge given, but no layer that target '{self.target}' matches has an adapter."
                " Remove the key"
            )
        own = lambda path, layer: change(layer) if path in paths else layer  # noqa: E731
        return tree.map_modules_by_path(model, LoraLinear, ".*", own)

    def _check_init_of(self, path: str, layer: Linear, sizes: Sequence[AdapterSize]) -> None:
        """Raises `ConfigError` if the adapter of a layer cannot start as `init` says."""
        inputs, outputs = (math.prod(axis.size for axis in axes_of(spec)) for spec in (layer.In, layer.Out))
        rank, largest = max(size.rank for size in sizes), inputs if self.init == "eva" else min(inputs, outputs)
        prefix = f"surgery lora: init: {self.init} given, but"
        if self.init != "default" and rank > largest:
            raise ConfigError(
                f"{prefix} the adapter of {path} has rank {rank}, and its matrix {outputs} x {inputs} gives at most"
                f" {largest}. Lower rank, or rank_pattern"
            )
        if self.init in SPLITS_WEIGHT and isinstance(layer.weight, StoredWeight):
            raise ConfigError(
                f"{prefix} it changes the weight of {path}, which is stored as {layer.weight.form}. Put this surgery before"
                " quantize, or remove init"
            )
        if self.init == "pissa" and any(size.rank and not size.scale for size in sizes):
            raise ConfigError(f"{prefix} it divides by alpha, which is 0 for {path}. Set a positive alpha")

    def _sizes(self, numbered: Sequence[tuple[str, int | None]], largest: int | None = None) -> list[AdapterSize]:
        """The sizes of the adapters at these numbered paths. Args: largest: rank; None does not limit it."""
        sizes = []
        for path, number in numbered:
            is_left_out = self._leaves_out(number) or path.startswith(f"{MTP}.")
            rank = 0 if is_left_out else _first_match(self.rank_pattern, path, self.rank)
            rank = rank if largest is None else min(rank, largest)
            alpha = _first_match(self.alpha_pattern, path, self.alpha)
            sizes.append(AdapterSize(rank, alpha / rank ** (0.5 if self.rslora else 1) if rank else 0.0))
        return sizes[:1] if len(set(sizes)) == 1 else sizes

    def _adapt_tables(self, model: LanguageModel, key: jax.Array) -> LanguageModel:
        """Adds adapters to the embedding tables that `embeddings` matches, and to the head that is tied to one."""
        tables, tied, names = tree.modules_by_path(model, Embedding), tied_table(model), table_names(model)
        if not any(map(self._matches_table, names)):
            raise ConfigError(
                f"surgery lora: embeddings: '{self.embeddings}' given, but "
                + (f"it matches none of {', '.join(names)}" if names else "the model has no embedding tables")
            )
        if self.ensure_weight_tying and (tied is None or self.use_dora or not self._matches_table(tied)):
            raise ConfigError(
                "surgery lora: ensure_weight_tying: true given, which needs a head that is tied to the token embedding, an"
                " adapter of that embedding, and no DoRA (its norms are over other axes in a head). Set it to false"
            )
        keys = iter(jax.random.split(key, 2 * len(tables)))

        def adapt(path: str, table: Embedding) -> Any:
            In, Out, is_tied = table.Vocab, table.Embed, path == tied
            lookup = self._of_table(path, table, In, Out, "b", next(keys))
            head_key, head = next(keys), None
            if is_tied and not self.ensure_weight_tying:
                head = self._of_table(head_of(path), table, Out, In, "a", head_key)
            if lookup is None and head is None:
                return table
            return LoraEmbedding(table, lookup, head, tied=is_tied, shared=is_tied and self.ensure_weight_tying)

        return tree.map_modules_by_path(model, Embedding, ".*", adapt)

    def _of_table(self, name: str, table: Embedding, In: Any, Out: Any, starts: Any, key: jax.Array) -> LowRank | None:
        """An adapter of a table's weight, if `embeddings` matches this name."""
        sizes = self._sizes([(name, None)])
        if not self._matches_table(name) or not sizes[0].rank:
            return None
        return LowRank.of(table.weight, In, Out, sizes, key=key, starts=starts, use_dora=self.use_dora)

    def _check_keys(self, model: LanguageModel, names: NumberedPaths, tables: Sequence[str]) -> None:
        """Raises `ConfigError` for patterns and layers that match nothing. Args: tables: names that `embeddings` matches."""
        numbers = {number for number in names.numbers.values() if number is not None}
        beyond = [str(layer) for layer in self.layers_to_transform or () if layer not in numbers]
        if beyond or self.layers_to_transform == []:
            problem = f"{', '.join(beyond)} given" if beyond else "an empty list given"
            is_whole = numbers == set(range(len(numbers)))
            listed = f"0 to {len(numbers) - 1}" if is_whole else ", ".join(map(str, sorted(numbers)))
            matching = (
                f"the matching layers are numbered {listed}" if numbers else "target matches no layer of the body"
            )
            raise ConfigError(f"surgery lora: layers_to_transform: {problem}, but {matching}")
        paths = [name for path in _adapter_paths(model, self) for name in names.known.get(path, [path])]
        paths += [name for name in names.all if name not in paths]
        paths += tables
        left_out = {name for name in paths if self._leaves_out(names.numbers.get(name))}
        for key in ("rank_pattern", "alpha_pattern"):
            self._check_patterns(key, paths, left_out)
        others = _other_paths(model)
        for pattern in self.modules_to_save:
            if not any(re.search(pattern, path) for path in others):
                raise ConfigError(
                    f"surgery lora: modules_to_save: '{pattern}' matches no parameter. {tree.closest_paths(pattern, others)}"
                )

    def _check_patterns(self, key: str, paths: Sequence[str], left_out: Collection[str]) -> None:
        """Raises `ConfigError` for a pattern by layer that decides nothing. Args: left_out: by `layers_to_transform`."""
        decided_by: dict[str, str] = {}
        for pattern in getattr(self, key):
            matching = [path for path in paths if re.search(pattern, path)]
            if not matching:
                raise ConfigError(
                    f"surgery lora: {key}: '{pattern}' matches no layer. {tree.closest_paths(pattern, paths)}"
                )
            kept = [path for path in matching if path not in left_out]
            if not kept:
                raise ConfigError(
                    f"surgery lora: {key}: '{pattern}' has no effect: it matches only {listed(matching)}, without adapters"
                    f" because of layers_to_transform: {self.layers_to_transform}. Remove the pattern, or add the layers"
                )
            if decided_by.keys() >= set(kept):
                before = listed(dict.fromkeys(f"'{decided_by[path]}'" for path in kept))
                raise ConfigError(
                    f"surgery lora: {key}: '{pattern}' has no effect: the first pattern that matches a layer decides, and all"
                    f" layers that it matches match an earlier one: {before}. Put '{pattern}' before them, or remove it"
                )
            decided_by |= {path: pattern for path in kept if path not in decided_by}

    def _leaves_out(self, number: int | None) -> bool:
        """Tells whether a layer has no adapter because of `layers_to_transform`. Args: number: None outside of layers."""
        return number is not None and number not in (self.layers_to_transform or (number,))

    def _matches_table(self, name: str) -> bool:
        return self.embeddings is not None and re.search(self.embeddings, name) is not None

    def _check_no_adapters(self, model: LanguageModel) -> None:
        """Refuses a second adapter on a layer: it would hide the first one from code that reads or writes adapters."""
        kinds = {"target": LoraLinear, "embeddings": LoraEmbedding, "experts": LoraExperts}
        for key, kind in kinds.items():
            paths = [path for path, _ in tree.modules_by_path(model, kind)]
            pattern = getattr(self, key)
            matches = [p for p in paths if pattern is not None and any(re.search(pattern, q) for q in (p, f"{p}.base"))]
            if matches:
                raise ConfigError(
                    f"surgery lora: {key} '{pattern}' matches {', '.join(matches)}, which already has an adapter. Change"
                    f" {key} to match other layers. To continue training existing adapters, remove the surgery"
                )

    def _check_dropout_applies(self, model: LanguageModel) -> None:
        """Refuses dropout on a head: the loss reads its weight and never calls the layer."""
        adapters = tree.modules_by_path(model, LoraLinear)
        if self.dropout and self.target is None and self.from_peft is None:
            raise ConfigError(
                f"surgery lora: dropout: {self.dropout} given, which has no effect: only tables have adapters, and what they"
                " look up is not dropped. Remove dropout"
            )
        heads = [path for path, layer in adapters if layer.dropout and VOCAB in names_of(layer.Out)]
        if self.dropout and self.embeddings is not None:
            heads += [
                head_of(path) for path, table in tree.modules_by_path(model, LoraEmbedding) if table.head is not None
            ]
        if heads:
            raise ConfigError(
                f"surgery lora: dropout: {self.dropout} given, but {', '.join(heads)} gets an adapter. The loss reads its"
                " weight directly, so dropout cannot be applied to its input. Set target and embeddings to other layers"
                " ('attn|mlp', 'tokens'), or remove dropout"
            )

    def _check_agreement(self, read: ReadAdapters, matched: Sequence[str]) -> None:
        """Raises `ConfigError` if this surgery's keys, or the paths that its patterns match, differ from the folder's."""
        problems = [
            f"{key}: {getattr(self, key)} given, but the folder has {value}"
            for key, value in read.keys.items()
            if key not in ("target", "embeddings", "experts") and getattr(self, key) != value
        ]
        problems += [
            f"target: matches {path}, which has no adapter in the folder"
            for path in matched
            if path not in read.adapters
        ]
        problems += [
            f"target: '{self.target}' does not match {path}, which has an adapter in the folder"
            for path in read.adapters
            if path not in matched
        ]
        if problems:
            raise ConfigError(
                f"surgery lora: from_peft: the adapters in {read.folder} do not match the surgery's other keys:\n"
                + "\n".join(f"  {problem}" for problem in problems)
                + "\nRemove these keys: they are read from adapter_config.json"
            )


def _largest(layer: Linear | ExpertLinear) -> int:
    """Half of the smaller side of a layer's matrix, at least 1."""
    return max(1, min(math.prod(axis.size for axis in axes_of(spec)) for spec in (layer.In, layer.Out)) // 2)


def _first_match(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if re.search(pattern, path)), default)


def _changes(model: LanguageModel) -> dict[str, LowRank]:
    """Path of the adapted layer, table or tied head -> its change. A head that shares the table's has none of its own."""
    kinds = (LoraLinear, LoraExperts)
    changes = {path: layer.change for kind in kinds for path, layer in tree.modules_by_path(model, kind)}
    for path, table in tree.modules_by_path(model, LoraEmbedding):
        table_changes = {path: table.lookup, head_of(path): table.head}
        changes |= {name: change for name, change in table_changes.items() if change is not None}
    return changes


def _adapter_paths(model: LanguageModel, lora: LoraConfig) -> list[str]:
    kinds = ((LoraLinear, lora.target), (LoraExperts, lora.experts))
    patterns = {path: pattern for kind, pattern in kinds for path, _ in tree.modules_by_path(model, kind)}
    return [
        path
        for path in _changes(model)
        if (pattern := patterns.get(path, lora.embeddings)) is not None and re.search(pattern, path)
    ]


def _other_paths(model: LanguageModel) -> list[str]:
    """The paths of all parameters outside the adapters and outside stored weights."""
    adapters = _adapter_leaves(model)
    stored = tuple(f"{path}." for path, _ in tree.modules_by_path(model, StoredWeight))
    others = (path for path, leaf in tree.leaves(model) if tree.is_inexact(leaf) and path not in adapters)
    return [path for path in others if not path.startswith(stored)]


def _adapter_leaves(model: LanguageModel) -> frozenset[str]:
    modules = [
        *(path for kind in (LoraLinear, LoraExperts) for path, _ in tree.modules_by_path(model, kind)),
        *(
            f"{path}.{side}"
            for path, table in tree.modules_by_path(model, LoraEmbedding)
            for side in ("lookup", "head")
            if getattr(table, side) is not None
        ),
    ]
    return frozenset(f"{module}.{name}" for module in modules for name in _ADAPTER_LEAVES)


def _read(folder: Path, model: LanguageModel, config: ModelConfig) -> ReadAdapters:
    if any(len(body.stacks) > len({stack.structure for stack in body.stacks}) for body in tree.modules(model, Body)):
        raise ConfigError(
            f"surgery lora: from_peft: the adapters in {folder} are for all layers, but these have been cut into stacks. Put"
            " the lora surgery before split_at"
        )
    return read_adapters(folder, config, AxisSizes.of_model(model))


def lora_for_inference(folder: Path, config: ModelConfig) -> LoraConfig:
    """The surgery that adds the adapters of a PEFT folder, without dropout. Reads no weights."""
    return LoraConfig(**{**lora_keys(folder, config), "dropout": 0.0})


def add_adapters(model: LanguageModel, folder: Path, config: ModelConfig, layout: Layout) -> LanguageModel:
    """The model with the adapters of a PEFT folder, in its dtype, for inference only. Call it inside `layout.use()`."""
    leaves = tree.leaves(model)
    read = _read(folder, model, config)
    lora = lora_for_inference(folder, config)
    abstract = jax.eval_shape(lambda m: lora.apply(m, key=jax.random.key(0)), model)
    dtype = next(leaf.dtype for _, leaf in leaves if tree.is_inexact(leaf))
    values, places = dict(leaves), dict(tree.leaves(abstract))
    for path, array in read.leaves(abstract).items():
        leaf = places[path]
        cast = array.astype(dtype if tree.is_inexact(leaf) else leaf.dtype)
        values[path] = NamedArray(jax.device_put(cast, layout.parameter_sharding(leaf.axes)), leaf.axes)
    return tree.map_leaves(lambda path, _: values[path if path in values else path.replace(".base.", ".")], abstract)


def adds_adapters(surgeries: Sequence[SurgeryConfig]) -> bool:
    """Tells whether a model that has been through these surgeries has adapters."""
    return any(isinstance(surgery, LoraConfig) for surgery in surgeries)


def round_adapters(model: LanguageModel, dtype: Any, saved: Sequence[str] = ()) -> LanguageModel:
    """The model with its adapters as they are after `save_peft` in this dtype. Args: saved: as of `save_peft`."""
    adapters = _adapter_leaves(model)

    def rounded(path: str, leaf: Any) -> Any:
        is_written = path in adapters or any(re.search(pattern, path) for pattern in saved)
        return leaf.astype(dtype).astype(leaf.dtype) if is_written and tree.is_inexact(leaf) else leaf

    return tree.map_leaves(rounded, model)


def saved_modules(surgeries: Sequence[SurgeryConfig]) -> list[str]:
    """The patterns of the parameters that belong to these surgeries' adapters."""
    return [pattern for surgery in surgeries if isinstance(surgery, LoraConfig) for pattern in surgery.modules_to_save]


def save_peft(
    folder: Location,
    model: LanguageModel,
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: Any,
    base: str,
    files: Mapping[str, bytes] | None = None,
    saved: Sequence[str] = (),
    rows: BaseRows | None = None,
    modules: Modules = TEXT_ALONE,
) -> None:
    """Writes only the adapters of a model, in PEFT's format. Every process must call this.

    Args:
        base: name of the base model, for adapter_config.json.
        files: additional files to write, such as the model card.
        saved: regular expressions for the paths of other parameters to write (`saved_modules`).
        rows: the vocabulary of the base; None if it has the model's.
        modules: of the base.
    """
    linear = dict(tree.modules_by_path(model, LoraLinear))
    dropouts = {path: layer.dropout for path, layer in linear.items()}
    if not (changes := _changes(model)):
        raise ConfigError("the checkpoint has no adapters. Remove --adapters")
    family_of_config(config)  # raises for a model that PEFT does not know
    tables = [path for path, _ in tree.modules_by_path(model, LoraEmbedding)]
    shared = any(table.shared for table in tree.modules(model, LoraEmbedding))
    leaves = dict(tree.leaves(model))
    others = {path: leaves[path] for path in _other_paths(model)}
    also = {
        path.replace(".base.", "."): leaf
        for path, leaf in others.items()
        if any(re.search(pattern, path) for pattern in saved)
    }
    (body,) = tree.modules(model, Body)
    adapters = []
    for path, change in changes.items():
        whole, layers = path_before_splits(path, body)
        # The numbers in `sizes` of the layers that this part of the stack has.
        numbers = [0] if change.layer is None else np.asarray(change.layer.array).reshape(-1).tolist()
        ranks = [
            change.sizes[number] if change.sizes else AdapterSize(change.a.axis_size(LORA), change.scale)
            for number in numbers
        ]
        a, b, times = linear[path].exported_pair if path in linear else (change.a, change.b, 1)
        pairs = tuple((times * size.rank, size.scale) for size in ranks)
        arrays = (a, b, change.magnitude)
        adapters.append(Adapter(whole, layers, *arrays, change.In, change.Out, pairs, dropouts.get(path)))
    adapted = Adapted(adapters, also, tables, shared, body.num_layers, AxisSizes.of_model(model))
    of_base = {"base": base, "rows": rows, "base_modules": modules}
    save_adapters(folder, adapted, config, layout, dtype=dtype, files=files or {}, **of_base)
