"""Extends the context of a model: longer sequences, and a rotary position embedding that is stretched to them.

Source: Peng et al. 2023, YaRN: Efficient Context Window Extension of Large Language Models (arXiv:2309.00071); Chen et al.
2023, position interpolation (arXiv:2306.15595); Ding et al. 2024, LongRoPE (arXiv:2402.13753); Xiong et al. 2023, Effective
Long-Context Scaling of Foundation Models (arXiv:2309.16039), section 2.1: a larger theta alone. Grattafiori et al. 2024, The
Llama 3 Herd of Models (arXiv:2407.21783), section 3.4.2: several phases.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax

from jaxlm.core.errors import ConfigError, within
from jaxlm.core.field_types import PositiveInt
from jaxlm.models.base import LanguageModel, ModelConfig, RotaryModel, with_context
from jaxlm.models.rope import RotaryConfig
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import encode
from jaxlm.surgery.base import SurgeryConfig


@choice(SurgeryConfig, "extend_context")
class ExtendContextConfig(SurgeryConfig):
    """Longer sequences in this phase, in all later ones and in exports. No parameter changes. Families without rotary
    position embedding are refused.

    Attributes:
        seq_len: tokens per sequence from here on; replaces `model.seq_len`.
        rope: rotary position embedding from here on, as `model.rope`, such as `{type: yarn}`, or `{theta: 5.0e+6}` for a
            larger base alone. Null keeps that of the model. Keys that you leave out: `theta` and `partial_rotary_factor` are
            those of the model, `original_max_position_embeddings` is its length before the first extension, `factor` is
            `seq_len` divided by that, and `max_position_embeddings` (longrope) is `seq_len`.
    """

    seq_len: PositiveInt
    rope: RotaryConfig | None = None

    def keys_from_files(self, keys: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
        before, rope, written = config.rotary, self.rope, keys.get("rope")
        if before is None or rope is None or not isinstance(written, Mapping):
            return {}
        original = before.original_length(config.seq_len)
        known = {
            "theta": before.theta,
            "partial_rotary_factor": before.partial_rotary_factor,
            "original_max_position_embeddings": original,
            "factor": self.seq_len / original,
            "max_position_embeddings": self.seq_len,
        }
        missing = {field.name for field in fields(rope)}.difference(written)
        return {"rope": replace(rope, **{key: value for key, value in known.items() if key in missing})}

    def changed(self, config: ModelConfig) -> ModelConfig:
        with within("surgery extend_context"):
            changed = with_context(config, self.seq_len, self.rope)
        if self.seq_len < config.seq_len:
            raise ConfigError(
                f"surgery extend_context: seq_len: {self.seq_len} given, but the model reads {config.seq_len} tokens already."
                " Give more, or lower model.seq_len"
            )
        if changed == config:
            raise ConfigError(
                f"surgery extend_context: seq_len: {self.seq_len} and rope: {encode(self.rope)} given, which the model has"
                " already. Remove the surgery, or give a longer seq_len or another rope"
            )
        original = None if self.rope is None else self.rope.original_length(self.seq_len)
        if original is not None and original > self.seq_len:
            raise ConfigError(
                f"surgery extend_context: rope.original_max_position_embeddings: {original} given, which is not shorter than"
                f" seq_len: {self.seq_len}, so nothing would be extended. Give the length before the first extension, or"
                " leave it out"
            )
        return changed

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        if not isinstance(model, RotaryModel):
            raise ConfigError(
                f"surgery extend_context: a model of type {type(model).__name__} has no rotary position embedding that jaxlm"
                " can change"
            )
        return model.with_context(self.seq_len, self.rope)

    def moved(self, moments: Any, sums: Any) -> Any:
        return moments.with_context(self.seq_len, self.rope)

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model
