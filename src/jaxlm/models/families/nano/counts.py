"""Counts of nanochat's model by its own conventions: parameters by group, scaling parameters, FLOPs per token.

Source: karpathy/nanochat (`nanochat/gpt.py`, commit b7629ef: `num_scaling_params`, `estimate_flops`). Batch size and length
of its runs follow from them, so they are exact here: they include the rows that pad the vocabulary, and they count
attention to every key of a window. `NanoConfig.flops_per_token` counts what is computed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxlm.models.families.nano.model import NanoConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by group, by nanochat's names.

    Attributes:
        transformer_matrices: all matrices of the blocks, and the gates of the value embeddings.
        scalars: factors of the residual stream and of the embedding, smear and backout.
    """

    wte: int
    value_embeds: int
    lm_head: int
    transformer_matrices: int
    scalars: int

    @property
    def total(self) -> int:
        return self.wte + self.value_embeds + self.lm_head + self.transformer_matrices + self.scalars

    @property
    def scaling(self) -> int:
        """The parameters by which nanochat's scaling laws measure a model: matrices and head."""
        return self.transformer_matrices + self.lm_head


def padded_vocab_size(config: "NanoConfig", vocab_size: int) -> int:
    """Rows of nanochat's tables for a vocabulary."""
    return -(-vocab_size // config.vocab_multiple) * config.vocab_multiple


def parameter_counts(config: "NanoConfig", vocab_size: int) -> ParameterCounts:
    """nanochat's `num_scaling_params`."""
    width, rows = config.hidden_dim, padded_vocab_size(config, vocab_size)
    kv_width, num_value_layers = config.KVHeads.size * config.HeadSize.size, config.ValueLayers.size
    block = 2 * width * (width + kv_width) + 2 * width * config.Mlp.size
    gate = config.KVHeads.size * config.value_gate_channels
    smear = config.smear_channels + bool(config.smear_channels)
    return ParameterCounts(
        wte=rows * width,
        value_embeds=num_value_layers * rows * kv_width,
        lm_head=rows * width,
        transformer_matrices=config.num_layers * block + num_value_layers * gate,
        scalars=2 * config.num_layers + smear + (config.backout is not None),
    )


def nanochat_flops_per_token(config: "NanoConfig", vocab_size: int) -> int:
    """nanochat's `estimate_flops`: 6 per weight in a matrix product (the smear gate is one), 12 per feature and key."""
    counts = parameter_counts(config, vocab_size)
    num_keys = sum(min(back, config.seq_len) for back in config.window_distances)
    return 6 * (counts.scaling + config.smear_channels) + 12 * config.hidden_dim * num_keys
