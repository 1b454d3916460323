"""No key of a StackWise configuration is ignored silently: whatever the others say, it changes the translation, adds a note,
or is refused."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from jaxlm.compat.stackwise.from_stackwise import from_stackwise
from jaxlm.core.errors import ConfigError
from jaxlm.reading.yaml import ConfigSource
from tests.compat.stackwise.test_stackwise import CLM, INPUT, LEARNED, QLORA, config, qlora

TABLE = {stack: {"rank": 9, "alpha": 3} for stack in range(3)}
CONFIGS = {
    "depth": config(),
    "clm": config(CLM),
    "qlora": config(QLORA),
    "qlora by patterns": config({**QLORA, "qlora_strategy": "progressive", "qlora_rank_pattern": "linear"}),
    "qlora by a table": config({**QLORA, "qlora_strategy": "variable", "qlora_configs": TABLE}),
    "qlora of the trunk": config({**QLORA, "qlora_enabled": False, "progressive_qlora": True}),
    "section qlora": qlora(enabled=True),
    "section qlora by patterns": qlora(strategy="progressive", rank_pattern="increasing"),
    "section qlora by a table": qlora(strategy="variable", configs=TABLE),
    "input": config(INPUT),
    "learned": config(LEARNED),
    "diffusion, input": config({**INPUT, "training_objective": "diffusion"}),
    "diffusion, depth": config({"training_objective": "diffusion"}),
    "whole": config({"enabled": False}),
    "not stored": config(training={"quantization_enabled": False}),
    "fractions": config({}, {"time_step_mask_fractions": [0.1, 0.5, 0.9]}),
    "tokenizer": config(data={"tokenizer_path": "t"}, model={"vocab_size": None}),
}
# Key -> a value, or a tuple of values, of which one has to have an effect.
KEYS: dict[tuple[str, ...], dict[str, Any]] = {
    ("training", "progressive"): {
        "target_stacks": 2,
        "trunk_strategy": "qlora",
        "new_stack_precision": "qlora",
        "qlora_rank": 5,
        "qlora_alpha": 7,
        "qlora_strategy": "variable",
        "qlora_rank_pattern": "linear",
        "qlora_alpha_pattern": "linear",
        "qlora_configs": {0: {"rank": 3}},
        "progressive_qlora": True,
        "progressive_qlora_rank": 3,
        "progressive_qlora_alpha": 5,
        "cache_activations": (True, False),
        "time_interpretation": "input",
        "time_embedding_dim": 64,
        "time_encoding_type": "learned",
        "stack_time_mapping": "exponential",
        "time_per_stack": 33,
    },
    ("training", "qlora"): {
        "rank": 5,
        "alpha": 7,
        "strategy": "progressive",
        "rank_pattern": "increasing",
        "alpha_pattern": "increasing",
        "progressive_rank": 3,
        "progressive_alpha": 5,
        "configs": {0: {"rank": 3}},
        "progressive_enabled": True,
        "lr": 1.0,
    },
    ("training",): {
        "epochs_per_stack": 3,
        "joint_tuning_steps": 4,
        "quantization_enabled": True,
        "quantization_type": "fp4",
        "time_step_masking": False,
        "num_time_steps": 9,
        "time_step_mask_fractions": [0.1, 0.2],
        "min_mask_fraction": 0.2,
        "max_mask_fraction": 0.7,
        "mask_schedule_type": "cosine",
        "mask_token_id": 9,
        "wandb_project": "p",
        "wandb_entity": "e",
        "wandb_run_name": "n",
        "wandb_tags": ["a"],
        "wandb_notes": "x",
        "cache_mode": "rack",
        "save_stacks": True,
    },
    ("model",): {"mask_fraction_min": 0.3, "mask_fraction_max": 0.6, "special_mask_id": 9},
    ("model", "tokenizer_embedding"): {"family": "gpt2"},
    ("data",): {"use_dummy_data": True, "num_samples": 3, "max_length": 77, "padding": "right", "shuffle": True},
}


def translated(tree: Mapping[str, Any]) -> Any:
    """The translation and its notes."""
    resolved = from_stackwise(ConfigSource(copy.deepcopy(dict(tree))))
    return resolved.source.tree, sorted(resolved.notes)


def has_effect(tree: Mapping[str, Any], path: tuple[str, ...], key: str, value: Any) -> bool:
    """Whether a key has the value already, or changes something. Args: path: of its section."""
    changed = copy.deepcopy(dict(tree))
    section = changed
    for name in path:
        section = section.setdefault(name, {})
    if section.get(key) == value:
        return True
    try:
        before = translated(changed)
        section[key] = value
        return translated(changed) != before
    except ConfigError:
        return True


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_is_ignored_silently(name: str):
    keys = [(path, key, value) for path, section in KEYS.items() for key, value in section.items()]
    assert [
        ".".join((*path, key))
        for path, key, value in keys
        if not any(
            has_effect(CONFIGS[name], path, key, one) for one in (value if isinstance(value, tuple) else [value])
        )
    ] == []
