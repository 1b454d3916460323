"""What keys of StackWise hold: those that have no effect beside some others, and the objective of all stacks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from jaxlm.compat.section import Section, Translated, as_yaml
from jaxlm.systems.progressive.patterns import Pattern


class _Kind(NamedTuple):
    types: tuple[Any, ...]
    text: str


_FLAG = _Kind((bool,), "true or false")
_NUMBER = _Kind((int, float), "a number")
_TEXT = _Kind((str,), "text")
_LIST = _Kind((list,), "a list")
_MAPPING = _Kind((Mapping,), "a mapping")
_Kinds = dict[str, _Kind | tuple[str, ...]]
"""Key -> what it holds, or the values it may have."""
STRATEGIES = ("simplified", "progressive", "variable")
LINEAR_PATTERNS = ("constant", "increasing", "decreasing")
_TRAINING: _Kinds = {
    **dict.fromkeys(("quantization_enabled", "time_step_masking", "save_stacks", "save_rack"), _FLAG),
    **dict.fromkeys(("min_mask_fraction", "max_mask_fraction", "num_time_steps", "mask_token_id"), _NUMBER),
    **dict.fromkeys(("current_block_lr", "log_interval"), _NUMBER),
    **dict.fromkeys(("wandb_project", "wandb_entity", "wandb_run_name", "wandb_notes"), _TEXT),
    "wandb_tags": _LIST,
    "quantization_type": ("fp4", "fp8", "fp16", "fp32"),
    "mask_schedule_type": ("linear", "cosine", "exponential"),
    "time_step_mask_fractions": _Kind((list,), "a list of fractions"),
}
_PROGRESSIVE: _Kinds = {
    **dict.fromkeys(("qlora_enabled", "progressive_qlora", "cache_activations"), _FLAG),
    **dict.fromkeys(("qlora_rank", "qlora_alpha", "progressive_qlora_rank", "progressive_qlora_alpha"), _NUMBER),
    **dict.fromkeys(("max_stacks", "target_stacks", "time_embedding_dim", "time_per_stack"), _NUMBER),
    **dict.fromkeys(("qlora_rank_pattern", "qlora_alpha_pattern"), get_args(Pattern)),
    "qlora_strategy": STRATEGIES,
    "qlora_configs": _MAPPING,
    "building_mode": ("append", "prepend"),
    "trunk_strategy": ("frozen", "qlora"),
    "time_interpretation": ("input", "depth"),
    "time_encoding_type": ("sinusoidal", "learned"),
    "stack_time_mapping": _Kind((str, list, Callable), "linear, exponential, or a list of time steps"),
}
_QLORA: _Kinds = {
    **dict.fromkeys(("enabled", "progressive_enabled", "mixed_precision"), _FLAG),
    **dict.fromkeys(("rank", "alpha", "progressive_rank", "progressive_alpha", "lr", "dropout"), _NUMBER),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), LINEAR_PATTERNS),
    "strategy": STRATEGIES,
    "configs": _MAPPING,
}
_MODEL: _Kinds = {
    **dict.fromkeys(("mask_fraction_min", "mask_fraction_max", "special_mask_id"), _NUMBER),
    "freeze_up_proj": _FLAG,
}
_DATA: _Kinds = {
    **dict.fromkeys(("use_dummy_data", "pin_memory"), _FLAG),
    **dict.fromkeys(("num_samples", "num_workers", "max_length"), _NUMBER),
}
_OF_SECTIONS = {"training": _TRAINING, "progressive": _PROGRESSIVE, "qlora": _QLORA, "model": _MODEL, "data": _DATA}
QLORA_KEYS = tuple(_QLORA)


def check_kinds(sections: Iterable[Section]) -> None:
    """Raises `ConfigError` for a value that its key cannot have."""
    for section in sections:
        for key, kind in _OF_SECTIONS[str(section.path[-1])].items():
            if (value := section.peek(key)) is None:
                continue
            if not isinstance(kind, _Kind):
                section.check_choice(key, value, kind)
            elif not isinstance(value, kind.types) or (isinstance(value, bool) and bool not in kind.types):
                raise section.error(key, f"{as_yaml(value)} given, {kind.text} expected")


MASK = "<|mask|>"


@dataclass(frozen=True)
class Objective:
    """A `training_objective`.

    Attributes:
        name: in StackWise.
        hides_tokens: whether masks are drawn.
        looks_both_ways: which attention it needs; None for either.
    """

    name: Literal["mlm", "clm", "custom", "diffusion"]
    hides_tokens: bool
    looks_both_ways: bool | None


_OBJECTIVES = {
    one.name: one
    for one in (
        Objective("mlm", True, True),
        Objective("clm", False, False),
        Objective("custom", False, None),
        Objective("diffusion", True, True),
    )
}
_TYPES = {"clm": "next_token"}


def put_objective(progressive: Section, training: Section, out: Translated) -> Objective:
    """Writes the objective of all stacks."""
    name = progressive.choice("training_objective", _OBJECTIVES, "mlm")
    training.ignore(
        "fine_tune_mode", f"no effect: all stacks have the objective progressive.training_objective ({name})"
    )
    out.put("objective.type", _TYPES.get(name, name), progressive, "training_objective")
    return _OBJECTIVES[name]
