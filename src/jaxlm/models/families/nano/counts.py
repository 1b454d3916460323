"""Counts of nanochat's model by its own conventions: parameters by group, scaling parameters, FLOPs per token.

Source: karpathy/nanochat (`nanochat/gpt.py`, commit b7629ef: `num_scaling_params`, `estimate_flops`). Batch size and length
of its runs follow from them, so they are exact here: they include the rows that pad the vocabulary, and they count
attention to every key of a window. `NanoConfig.flops_per_token` counts what is computed.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxlm.models.families.nano.lookup import lookup_width

if TYPE_CHECKING:
    from jaxlm.models.families.nano.model import NanoConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by group, by nanochat's names.

    Attributes:
        transformer_matrices: all matrices of the blocks, and the gates of the value embeddings.
        scalars: factors of the residual stream and of the embedding, smear and backout.
        l3_embeds, l3_matrices: the tables and the matrices of the lookup layers.
    """

    wte: int
    value_embeds: int
    lm_head: int
    transformer_matrices: int
    scalars: int
    l3_embeds: int = 0
    l3_matrices: int = 0

    @property
    def total(self) -> int:
        embeddings = self.wte + self.value_embeds + self.l3_embeds
        return embeddings + self.lm_head + self.transformer_matrices + self.l3_matrices + self.scalars

    @property
    def scaling(self) -> int:
        """The parameters by which nanochat's scaling laws measure a model: matrices and head, without lookup layers."""
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
        l3_embeds=num_lookup_rows(config, vocab_size) * width,
        l3_matrices=_num_lookups(config) * _lookup_matrices(config),
    )


def num_lookup_entries(config: "NanoConfig", vocab_size: int) -> int:
    """Entries in the table of each lookup layer; 0 without such layers."""
    lookup = config.lookup
    if lookup is None:
        return 0
    if lookup.num_entries is not None:
        return lookup.num_entries
    one_each = replace(config, lookup=replace(lookup, num_entries=vocab_size))
    return max(vocab_size, parameter_counts(one_each, vocab_size).total // 1000)


def num_lookup_rows(config: "NanoConfig", vocab_size: int) -> int:
    """Entries of all lookup layers, those of keys and values counted separately."""
    tables = 2 if config.lookup is not None and not config.lookup.tied else 1
    return _num_lookups(config) * tables * num_lookup_entries(config, vocab_size)


def _num_lookups(config: "NanoConfig") -> int:
    return 0 if config.lookup is None else len(config.lookup.layers)


def _lookup_matrices(config: "NanoConfig") -> int:
    """Weights in the matrices of one lookup layer."""
    width = config.hidden_dim
    hidden = 0 if config.lookup is None else lookup_width(config.lookup, width)
    return width * hidden + (hidden + width) * width


def nanochat_flops_per_token(config: "NanoConfig", vocab_size: int) -> int:
    """nanochat's `estimate_flops`: 6 per weight in a matrix product (the smear gate is one), 12 per feature and key.

    It counts the forward products of lookup layers once more, and of what they read only the scores.
    """
    counts = parameter_counts(config, vocab_size)
    num_keys = sum(min(back, config.seq_len) for back in config.window_distances)
    weights = counts.scaling + config.smear_channels + counts.l3_matrices
    scores = 2 * num_lookup_entries(config, vocab_size) / vocab_size * config.hidden_dim
    again = int(_num_lookups(config) * (scores + 2 * _lookup_matrices(config)))
    return 6 * weights + 12 * config.hidden_dim * num_keys + again
