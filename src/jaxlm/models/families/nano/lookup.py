"""Lookup layers: each token attends to entries of a table that are its own.

Source: Tseng and De Sa 2026, Large Lookup Layers (arXiv:2601.21461), equation 1: with the entries K_t and V_t of token t,

    x + W_mix [norm(W_up V_t^T softmax(scale K_t norm(x))); x]

karpathy/nanochat (`nanochat/l3.py`, commit b7629ef) has them after some of its layers. Its scores have no scale and its keys
no norm: with keys of N(0, 1), the standard deviation of the scores is sqrt(embed), and the softmax takes one entry of many.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from jaxlm.core.axes import (
    BATCH,
    EMBED,
    LOOKUP_BOUNDS,
    LOOKUP_ENTRIES,
    LOOKUP_MIX,
    LOOKUP_MLP,
    POSITION,
)
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveFloat, PositiveInt
from jaxlm.core.sharding import current_layout, for_compute
from jaxlm.models.families.nano.allocation import Allocation, allocate, uniform_bounds
from jaxlm.models.families.nano.layers import uniform_linear, zero_linear
from jaxlm.models.families.nano.lookup_kernel import Scores, attend_to_entries
from jaxlm.models.linear import Linear, MatrixLinear
from jaxlm.models.norms import UnweightedRMSNorm
from jaxlm.models.token_sharding import mesh_axes


@dataclass(frozen=True)
class LookupConfig:
    """Lookup layers, each with a table of which every token has some entries.

    Attributes:
        layers: numbers of the layers, from 0, after each of which a lookup layer follows. The middle of the model is best.
        num_entries: entries of each table. Null is a thousandth of the parameters that the model has with one entry for each
            token, and at least the vocabulary, as in nanochat.
        max_entries: the most entries of a token. Not with `uniform`, which gives all tokens the same number.
        allocation: how many entries each token gets, at least one. `lzw`: one for each frequent sequence of tokens that ends
            with it, found in a sample of the training tokens. `nanochat`: as in its code, which gives all tokens the same
            number, and one more to the most frequent ones. `uniform`: the same number for all, without looking at the tokens.
        sample_tokens: training tokens in that sample, at most. nanochat's are 204,800. Not with `uniform`.
        mlp_dim: hidden width. Null is four times `model.hidden_dim`.
        tied: use the keys as values too.
        key_norm: normalize the keys. nanochat does not.
        score_scale: factor of the scores. Null is `1 / sqrt(model.hidden_dim)`. nanochat's is 1.
    """

    layers: list[NonNegativeInt]
    num_entries: PositiveInt | None = None
    max_entries: PositiveInt = 512
    allocation: Allocation = "lzw"
    sample_tokens: PositiveInt = 10_000_000
    mlp_dim: PositiveInt | None = None
    tied: bool = True
    key_norm: bool = True
    score_scale: PositiveFloat | None = None

    def __post_init__(self):
        # The config is a static field of the model: it must be hashable.
        object.__setattr__(self, "layers", tuple(self.layers))

    def check(self, num_layers: int) -> None:
        """Raises `ConfigError` if these lookup layers do not fit a model with `num_layers` layers."""
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ConfigError(
                f"model.lookup.layers: {list(self.layers)} given, different numbers of layers expected, such as"
                f" [{num_layers // 2}]. To train without lookup layers, remove model.lookup"
            )
        if max(self.layers) >= num_layers:
            raise ConfigError(
                f"model.lookup.layers: {list(self.layers)} given, 0 to {num_layers - 1} expected (num_layers - 1)"
            )
        for key in ("max_entries", "sample_tokens"):
            value = getattr(self, key)
            if self.allocation == "uniform" and value != getattr(LookupConfig, key):
                raise ConfigError(
                    f"model.lookup.{key}: {value:,} given, which has no effect with allocation: uniform. Remove it, or set"
                    " allocation to lzw or nanochat"
                )

    def check_entries(self, num_entries: int, vocab_size: int) -> None:
        """Raises `ConfigError` if `num_entries` does not suit a vocabulary of this size."""
        if num_entries < vocab_size:
            raise ConfigError(
                f"model.lookup.num_entries: {num_entries:,} given, but each of the {vocab_size:,} tokens needs an entry."
                " Raise it, or remove it"
            )
        if num_entries > vocab_size * self.most_entries(num_entries, vocab_size):
            raise ConfigError(
                f"model.lookup.max_entries: {self.max_entries} given, so {vocab_size:,} tokens have at most"
                f" {vocab_size * self.max_entries:,} entries, but the table has {num_entries:,}. Raise max_entries, or set"
                " num_entries to a lower number"
            )

    def most_entries(self, num_entries: int, vocab_size: int) -> int:
        """The most entries that a token may have in a table of this size."""
        return -(-num_entries // vocab_size) if self.allocation == "uniform" else self.max_entries

    def bounds_of(self, sequences: Sequence[np.ndarray], num_entries: int, vocab_size: int) -> np.ndarray:
        """Where the entries of each token begin, and where the last ones end, int32 [vocab + 1].

        Args:
            sequences: the sample of training tokens.
        """
        entries = allocate(self.allocation, sequences, vocab_size, num_entries, self.max_entries)
        return np.concatenate([[0], np.cumsum(entries)]).astype(np.int32)


class LookupLayer(eqx.Module):
    """What a lookup layer adds to the residual stream.

    Attributes:
        keys_embedding: {lookup_entries, embed}.
        values_embedding: {lookup_entries, embed}; None if the keys are the values too.
        bounds: int32 {lookup_bounds}: token t has the entries from `bounds[t]` to `bounds[t + 1]`. Not trained.
        up_proj: from the values read to the hidden features.
        mix_proj: from these and the residual stream, side by side, to what is added.
        norm: of the residual stream.
    """

    keys_embedding: NamedArray
    values_embedding: NamedArray | None
    bounds: NamedArray
    up_proj: Linear | MatrixLinear
    mix_proj: Linear | MatrixLinear
    norm: UnweightedRMSNorm
    scores: Scores = eqx.field(static=True)

    @staticmethod
    def init(
        config: LookupConfig, Vocab: Axis, Embed: Axis, num_entries: int, epsilon: float, *, key: jax.Array
    ) -> "LookupLayer":
        """Initializes a layer that adds nothing, with entries for all tokens alike.

        Args:
            epsilon: added to the mean square in norms.
        """
        k_keys, k_values, k_up = jax.random.split(key, 3)
        Entries, Hidden = Axis(LOOKUP_ENTRIES, num_entries), Axis(LOOKUP_MLP, lookup_width(config, Embed.size))
        scale = Embed.size**-0.5 if config.score_scale is None else config.score_scale
        bounds = jnp.asarray(uniform_bounds(Vocab.size, num_entries), jnp.int32)
        return LookupLayer(
            keys_embedding=hax.random.normal(k_keys, (Entries, Embed)),
            values_embedding=None if config.tied else hax.random.normal(k_values, (Entries, Embed)),
            bounds=NamedArray(bounds, (Axis(LOOKUP_BOUNDS, Vocab.size + 1),)),
            up_proj=uniform_linear(Embed, Hidden, std=Embed.size**-0.5, key=k_up),
            mix_proj=zero_linear(Axis(LOOKUP_MIX, Hidden.size + Embed.size), Embed),
            norm=UnweightedRMSNorm(Embed, epsilon),
            scores=Scores(scale, epsilon if config.key_norm else None, config.most_entries(num_entries, Vocab.size)),
        )

    def __call__(self, x: NamedArray, tokens: NamedArray) -> NamedArray:
        """Maps {batch, position, embed} and int {batch, position} to the shape of x."""
        up_proj, mix_proj = for_compute((self.up_proj, self.mix_proj))
        hidden = up_proj(self._read(self.norm(x), tokens))
        hidden = UnweightedRMSNorm(hidden.resolve_axis(LOOKUP_MLP), self.norm.eps)(hidden)
        mixed = hax.concatenate(LOOKUP_MIX, [hidden.rename({LOOKUP_MLP: LOOKUP_MIX}), x.rename({EMBED: LOOKUP_MIX})])
        return mix_proj(mixed.astype(x.dtype)).rearrange(x.axes)

    def _read(self, q: NamedArray, tokens: NamedArray) -> NamedArray:
        """What the tokens read from their entries, {batch, position, embed}."""
        keys, values = for_compute((self.keys_embedding, self.values_embedding), sum_first=True)
        q = q.rearrange((BATCH, POSITION, EMBED))
        ids, bounds = tokens.rearrange((BATCH, POSITION)).array, self.bounds.array
        tables = [None if table is None else table.rearrange((LOOKUP_ENTRIES, EMBED)).array for table in (keys, values)]

        def read(q_BTD: jax.Array, ids_BT: jax.Array, bounds: jax.Array, tables: list[Any]) -> jax.Array:
            q_ND = q_BTD.reshape(-1, q_BTD.shape[-1])
            return attend_to_entries(self.scores, q_ND, ids_BT.reshape(-1), bounds, *tables).reshape(q_BTD.shape)

        return NamedArray(_on_each_device(read, q)(q.array, ids, bounds, tables), q.axes)


def _on_each_device(read: Callable[..., jax.Array], q: NamedArray) -> Callable[..., jax.Array]:
    """Runs `read` on each device's tokens: sorting them must not move them between devices."""
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return read
    names = [mesh_axes(axis, layout.compute) for axis in q.axes[:2]]
    sizes = [math.prod(layout.mesh.shape[name] for name in names_of_axis) for names_of_axis in names]
    # Generation may have fewer rows than there are devices.
    divides = [axis.size % size == 0 for axis, size in zip(q.axes, sizes, strict=False)]
    entries = [axes if fits and axes else None for axes, fits in zip(names, divides, strict=True)]
    tokens, whole = PartitionSpec(*entries), PartitionSpec()
    # The check would require annotations on every loop carry.
    return jax.shard_map(
        read, mesh=layout.mesh, in_specs=(tokens, tokens, whole, whole), out_specs=tokens, check_vma=False
    )


def lookup_width(config: LookupConfig, embed: int) -> int:
    """The hidden width of a lookup layer."""
    return 4 * embed if config.mlp_dim is None else config.mlp_dim
