"""Expands one section into a phase for each stack of layers: progressive growth.

    stack_0 -> grow -> stack_1 -> (polish_1) -> grow -> stack_2 -> (polish_2) ...

The adapters that a stack gets when it becomes part of the trunk have a rank and an alpha by a pattern (`StackAdapters`).

Source: StackWise: stacks that are trained one after the other on a frozen or adapted trunk; the ranks by stack are its
`qlora_rank_pattern` and `qlora_alpha_pattern`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import (
    LARGEST_FLOAT,
    LARGEST_INT,
    SMALLEST_FLOAT,
    NonNegativeInt,
    NumLayers,
    NumStacks,
    PositiveFloat,
    PositiveInt,
)
from jaxlm.core.rules import Rules, excludes, only
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import TransformerConfig
from jaxlm.models.growth import Place
from jaxlm.models.stack_paths import NEW_STACK
from jaxlm.plan.presets.base import Derivation, DerivedNumber, PresetConfig
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import config_error, decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.surgery.quantize import Kind
from jaxlm.systems.progressive.depth_times import DepthTimes, StackTime
from jaxlm.systems.progressive.patterns import ALPHA_STEP, RANK_STEP, Pattern, by_pattern

_ADAPTED = r"layers\..*(attn|mlp)"
_ADAPTERS = r"\.[ab]$"


@dataclass(frozen=True)
class StackRank:
    """The adapters of one stack.

    Attributes:
        rank: their rank.
        alpha: their outputs are scaled by alpha / rank.
    """

    rank: PositiveInt
    alpha: PositiveFloat


@dataclass(frozen=True)
class StackAdapters:
    """The adapters that a stack gets when it becomes part of the trunk, numbered k = 0, 1, ... as the stacks were added. No
    rank is more than half of the smaller side of a matrix, or less than 1.

    Attributes:
        rank: of the first stack.
        alpha: of the first stack; the outputs of adapters are scaled by alpha / rank.
        rank_pattern: `constant`; `increasing`, rank * 2^k; `decreasing`, rank / 2^k rounded down; or `linear`, rank + 8 k.
        alpha_pattern: likewise; `linear` is alpha + 16 k.
        stacks: rank and alpha of the first stacks, in order, instead.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    rank_pattern: Pattern = "constant"
    alpha_pattern: Pattern = "constant"
    stacks: list[StackRank] = field(default_factory=list)

    def of(self, number: int) -> StackRank:
        """The adapters of a stack."""
        if number < len(self.stacks):
            return self.stacks[number]
        rank = int(by_pattern(self.rank, self.rank_pattern, number, RANK_STEP))
        alpha = by_pattern(self.alpha, self.alpha_pattern, number, ALPHA_STEP)
        if not SMALLEST_FLOAT <= alpha <= LARGEST_FLOAT:
            raise ConfigError(
                f"preset.lora.alpha_pattern: {self.alpha_pattern} given with alpha: {self.alpha:g}, which makes"
                f" {alpha:.4g} for stack {number}: float32 holds {SMALLEST_FLOAT:.2g} to {LARGEST_FLOAT:.2g}. Set another"
                " pattern"
            )
        return StackRank(min(max(1, rank), LARGEST_INT), alpha)


@choice(PresetConfig, "progressive")
class ProgressiveConfig(PresetConfig):
    """Fills in `phases`: the model of the section `model` trains first (`stack_0`), and then grows by a stack of layers at a
    time (`stack_1`, ...). Data, objective and optimizer are those of the top level; the learning-rate schedule starts anew in
    every phase, unless `carry_optimizer` is set.

    Attributes:
        stacks: number of stacks at the end, with the first one.
        steps_per_stack: steps of each stack.
        layers_per_stack: layers of each new stack; null for as many as the model has at first.
        polish_steps: steps in which all parameters train after each growth (`polish_1`, ...); 0 for none.
        at: where new stacks go: `append` puts them before the head, `prepend` after the embeddings.
        init: how new layers start, as in the surgery `grow`; `copy` only without `trunk: lora` and `store`.
        trunk: what happens to the stacks that are there already, while a new one trains: they are `frozen`, have adapters
            that train (`lora`), or `train` too.
        cache: store what the trunk computes, instead of computing it in every step; `int8` in 8 bits. Only for an appended
            stack on a frozen trunk and frozen embeddings.
        train_head: train the head with the new stack. Null trains it if stacks are appended and it is not tied to the
            embeddings.
        train_norm: train the final norm with the new stack. Null trains it if stacks are appended.
        train_embeddings: train the embeddings with the new stack.
        carry_optimizer: parameters that trained in the phase before keep their optimizer state, and the learning-rate
            schedule goes on over all phases.
        lora: the adapters of a trunk with `trunk: lora`. Null is the same as `{}`.
        store: how the weights of a stack's linear layers are stored once it is part of the trunk, as `kind` of the surgery
            `quantize`; with `trunk: lora` and `nf4` this is a QLoRA trunk. Null leaves them as they are.
        depth_times: give each stack a noise of its own, for the objectives `mlm` and `diffusion`. Null hides as many tokens
            for all of them.
    """

    phase_keys: ClassVar[tuple[str, ...]] = ("stacks", "steps_per_stack", "polish_steps")

    stacks: NumStacks = 3
    steps_per_stack: PositiveInt = 1000
    layers_per_stack: NumLayers | None = None
    polish_steps: NonNegativeInt = 0
    at: Place = "append"
    init: Literal["identity", "copy", "random"] = "identity"
    trunk: Literal["frozen", "lora", "train"] = "frozen"
    cache: bool | Literal["int8"] = False
    train_head: bool | None = None
    train_norm: bool | None = None
    train_embeddings: bool = False
    carry_optimizer: bool = False
    lora: StackAdapters | None = None
    store: Kind | None = None
    depth_times: DepthTimes | None = None

    key_rules: ClassVar[Rules] = (
        excludes("store", when="init", is_="copy", why="but what a new stack would copy is in another form then"),
        excludes("store", when="trunk", is_="train", why="but stored weights cannot be trained"),
        excludes("store", "polish_steps", why="but stored weights cannot be trained"),
        excludes(
            "train_head", "train_norm", "train_embeddings", when="trunk", is_="train", why="which trains everything"
        ),
        only("lora", when="trunk", is_="lora"),
    )

    def derive(self, source: ConfigSource) -> Derivation:
        self._check(source)
        times = self._times(source)
        phases = [phase for number in range(self.stacks) for phase in self._stage(number, source, self.at, times)]
        written = source.tree.get("phases") or phases
        if not isinstance(written, list) or not all(isinstance(phase, Mapping) for phase in written):
            raise ConfigError(
                "phases: single keys given with preset.type: progressive, which writes the phases itself. Change keys of the"
                " preset instead, or write the whole list `phases` in the YAML (--dry_run true lists the preset's)"
            )
        return Derivation({"phases": phases}, tuple(_row(phase, written, times) for phase in phases))

    def stage(self, number: int, source: ConfigSource, before: Place | None = None) -> list[dict[str, Any]]:
        """The phase in which a stack trains, and the one that polishes the model after it.

        Args:
            number: of the stack, in the order of training.
            source: the configuration.
            before: where the stack before it was added; None for `at`.

        Raises:
            ConfigError: keys contradict each other.
        """
        self._check(source)
        return self._stage(number, source, before or self.at, self._times(source))

    def _stage(
        self, number: int, source: ConfigSource, before: Place, times: Mapping[str, StackTime]
    ) -> list[dict[str, Any]]:
        phases = [self._training(number, source, before)]
        if self.polish_steps and number:
            phases.append({"name": f"polish_{number}", "num_train_steps": self.polish_steps})
        carried = {"carry_optimizer": True} if self.carry_optimizer and number else {}
        return [{**self._timed(phase, times), **carried} for phase in phases]

    def _times(self, source: ConfigSource) -> dict[str, StackTime]:
        """The times of all phases, by name; empty if none has its own."""
        if self.depth_times is None:
            return {}
        by_place = self.depth_times.of(self.stacks, source.tree, _objective(source), _model(source).seq_len)
        places = self.depth_times.places(self.stacks, prepended=self.at == "prepend")
        return {
            f"{kind}_{number}": by_place[place] for number, place in enumerate(places) for kind in ("stack", "polish")
        }

    def _timed(self, phase: dict[str, Any], times: Mapping[str, StackTime]) -> dict[str, Any]:
        """The phase with the noise of its stack, and with what stacks in front of others have learned to remove."""
        if phase["name"] not in times:
            return phase
        noise = {"data": times[phase["name"]].data}
        kind, _, number = phase["name"].partition("_")
        if self.at == "append" or kind == "polish":
            return {**phase, **noise}
        until = [times[f"stack_{earlier}"].fractions[1] for earlier in range(int(number) + 1)]
        denoisers = {"type": "denoisers", "parts": "suffixes", "mask_fractions": until}
        return {**phase, "surgery": [*phase.get("surgery", []), denoisers], **noise}

    def _training(self, number: int, source: ConfigSource, before: Place) -> dict[str, Any]:
        phase: dict[str, Any] = {"name": f"stack_{number}", "num_train_steps": self.steps_per_stack}
        if number == 0:
            return phase
        surgery: list[dict[str, Any]] = []
        if self.store is not None:
            # The stack that trained last; those before are stored already.
            newest = "" if number == 1 else rf"{number - 1}\." if before == "append" else r"0\."
            surgery.append({"type": "quantize", "kind": self.store, "modules": rf"^body\.{newest}layers\."})
        if self.trunk == "lora":
            size = self._adapters.of(number - 1)
            keys = {"type": "lora", "target": _ADAPTED, "existing": "keep", "cap_rank": True}
            surgery.append({**keys, "rank": size.rank, "alpha": size.alpha})
        surgery.append({"type": "grow", "num_layers": self._num_layers(source), "at": self.at, "init": self.init})
        phase["surgery"] = surgery
        phase["trainable"] = [".*"] if self.trunk == "train" else self._trainable(_model(source))
        if self.cache:
            stored = {"type": "cached_trunk", "objective": _objective(source)}
            phase["objective"] = {**stored, "int8": True} if self.cache == "int8" else stored
        return phase

    def _num_layers(self, source: ConfigSource) -> int:
        if self.layers_per_stack is not None:
            return self.layers_per_stack
        if source.tree.get("use_hf_model_config"):
            raise ConfigError(
                "preset.layers_per_stack: null given with use_hf_model_config. Set it to the number of layers of a new stack"
            )
        return _model(source).Layers.size

    @property
    def _adapters(self) -> StackAdapters:
        return StackAdapters() if self.lora is None else self.lora

    def _trainable(self, model: ModelConfig) -> list[str]:
        appended = self.at == "append"
        tied = _is_tied(model)
        train_head = appended and not tied if self.train_head is None else self.train_head
        train_norm = appended if self.train_norm is None else self.train_norm
        others = {
            "final_norm": train_norm,
            "^tokens" if tied else "^head": train_head,
            "^(tokens|positions)": self.train_embeddings,
            _ADAPTERS: self.trunk == "lora",
        }
        return [NEW_STACK, *(pattern for pattern, trains in others.items() if trains)]

    def _check(self, source: ConfigSource) -> None:
        if self.stacks == 1:
            raise ConfigError("preset.stacks: 1 given, but then nothing grows. Give 2 or more, or remove the preset")
        if self.cache and (conflict := self._changes_trunk(source)) is not None:
            key, why = conflict
            raise ConfigError(
                f"preset.cache: {str(self.cache).lower()} given with {key}, but {why}, so that its output cannot be stored."
                " Remove one of the two"
            )
        if self.init == "copy" and self.trunk == "lora":
            raise ConfigError(
                "preset.init: copy given with trunk: lora, but the weights that a new stack would copy are under adapters"
                " then. Set init: identity or random, or another trunk"
            )
        if (given := len(self._adapters.stacks)) >= self.stacks:
            only = "the first one becomes" if self.stacks == 2 else f"the first {self.stacks - 1} become"
            raise config_error(
                source,
                ("preset", "lora", "stacks"),
                f"{given} stacks given, but of {self.stacks} stacks only {only} part of a trunk. Remove"
                f" {given - self.stacks + 1} of them, or change preset.stacks",
            )

    def _changes_trunk(self, source: ConfigSource) -> tuple[str, str] | None:
        """A key, with its value, under which what the trunk computes changes while a stack trains, and why; None if none."""
        if self.at != "append":
            return f"at: {self.at}", "the trunk reads what the new stack computes"
        if self.trunk != "frozen":
            return f"trunk: {self.trunk}", "the trunk changes in every step"
        if self.train_embeddings:
            return "train_embeddings: true", "the trunk reads the embeddings, which change in every step"
        if self.train_head and _is_tied(_model(source)):
            why = "the head is the embeddings (model.tie_word_embeddings), which the trunk reads and each step changes"
            return "train_head: true", why
        return None


@dataclass(frozen=True)
class _ModelSection:
    model: ModelConfig = field(default_factory=LlamaConfig)


def _model(source: ConfigSource) -> ModelConfig:
    return decode(_ModelSection, ConfigSource({"model": source.tree.get("model", {})}, source.marks)).model


def _is_tied(model: ModelConfig) -> bool:
    return isinstance(model, TransformerConfig) and model.tie_word_embeddings


def _objective(source: ConfigSource) -> dict[str, Any]:
    return source.tree.get("objective") or {"type": "next_token"}


def _row(
    phase: Mapping[str, Any], written: Sequence[Mapping[str, Any]], times: Mapping[str, StackTime]
) -> DerivedNumber:
    """A phase as a row of the start-up table. Args: written: the phases of the configuration; times: by phase."""
    keys = lambda one: " ".join(f"{key} {value}" for key, value in one.items() if key != "type")  # noqa: E731
    changes = "; ".join(f"{one['type']} ({keys(one)})" for one in phase.get("surgery", []))
    trains = ", ".join(phase.get("trainable", ["everything"]))
    stored = ", trunk stored" if "objective" in phase else ""
    noise = f", {times[phase['name']]}" if phase["name"] in times else ""
    names = [one.get("name") for one in written]
    instead = "" if phase["name"] in names else "you wrote other phases"
    formula = f"{phase['num_train_steps']:,} steps, trains {trains}{stored}{noise}"
    return DerivedNumber(str(phase["name"]), changes or "no change of the model", formula, "", instead=instead)
