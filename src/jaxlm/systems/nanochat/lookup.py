"""Lookup layers: each token attends to entries of a table that are its own.

With the entries K_t and V_t of token t, a layer computes

    x + W_mix [norm(W_up V_t^T softmax(scale K_t norm(x))); x]

karpathy/nanochat has them after some of its layers. Its scores have no scale and its keys no norm: with keys of N(0, 1),
the standard deviation of the scores is sqrt(embed), and the softmax takes one entry of many.

How many entries each token gets is allocated from the data (`allocate`). Padding every token to the most entries that a
token has would copy the table many times over. Instead, tokens are sorted by their number of entries and processed in
chunks. A loop over blocks of entries, with an online softmax, ends with the chunk's largest number of entries, so that
little is read in vain, and at most chunk x block rows of the table are gathered at a time. The backward pass gathers them
again, and adds their gradients into one array of the size of the table.

Source: Tseng and De Sa 2026, Large Lookup Layers (arXiv:2601.21461), equation 1, and algorithm 1 for `lzw`;
karpathy/nanochat (`nanochat/l3.py`, commit b7629ef) for `nanochat`; online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867, algorithm 3); recomputation from the saved logarithm of the sum as in FlashAttention (Dao et al. 2022,
arXiv:2205.14135, algorithm 4).

Shapes: N tokens, C tokens of a chunk, E entries of a block, M entries of the table, D embed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.ad_checkpoint import checkpoint_name
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
from jaxlm.core.parameters import TABLE, DeclaresParameters, Parameter
from jaxlm.core.rules import Rules, only
from jaxlm.core.sharding import current_layout, current_platform, for_compute
from jaxlm.core.tracing import CustomVjp, trace_options
from jaxlm.models.attention.backends.blockwise import ATTENTION
from jaxlm.models.linear import Linear, MatrixLinear
from jaxlm.models.norms import UnweightedRMSNorm
from jaxlm.models.token_sharding import mesh_axes
from jaxlm.systems.nanochat.layers import uniform_linear, zero_linear

_BLOCK = 16  # entries
_NEVER = -1e30  # so low that its exponential is 0. Finite, because infinities have undefined differences


class Scores(NamedTuple):
    """Describes how queries and keys are compared. Static.

    Attributes:
        scale: factor of the scores.
        key_epsilon: added to the mean square of a key when it is normalized; None does not normalize keys.
        max_entries: the most entries that a token has.
    """

    scale: float
    key_epsilon: float | None
    max_entries: int

    def of(self, q_CD: jax.Array, k_CED: jax.Array) -> jax.Array:
        """The scores, float32 [C, E]."""
        k_CED = k_CED.astype(jnp.float32)
        if self.key_epsilon is not None:
            k_CED = k_CED * jax.lax.rsqrt(jnp.mean(jnp.square(k_CED), -1, keepdims=True) + self.key_epsilon)
        return self.scale * jnp.einsum("cd,ced->ce", q_CD.astype(jnp.float32), k_CED)


class _Sorted(NamedTuple):
    """Tokens in chunks, sorted by their number of entries.

    Attributes:
        order: [N], the number of the token at each place.
        first, count: [chunks, C], the first entry of each token, and how many it has; 0 for padding.
    """

    order: jax.Array
    first: jax.Array
    count: jax.Array

    @staticmethod
    def of(ids_N: jax.Array, bounds: jax.Array, chunk: int) -> "_Sorted":
        first, count = bounds[ids_N], bounds[ids_N + 1] - bounds[ids_N]
        numbers = jnp.arange(ids_N.size, dtype=jnp.int32)
        # By id too, so that tokens that read the same entries are neighbors.
        count, _, order = jax.lax.sort((count, ids_N, numbers), num_keys=2)
        return _Sorted(order, _chunks(first[order], chunk), _chunks(count, chunk))

    def chunks(self, x_ND: jax.Array) -> jax.Array:
        """[chunks, C, ...]: one array of the tokens, in this order."""
        return _chunks(x_ND[self.order], self.first.shape[1])

    def unsorted(self, chunks: jax.Array) -> jax.Array:
        """[N, ...]: the inverse of `chunks`."""
        size = self.order.size
        flat = chunks.reshape(-1, *chunks.shape[2:])[:size]
        return jnp.zeros_like(flat).at[self.order].set(flat, unique_indices=True)


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    padding = -x.shape[0] % chunk
    return jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])


def _chunk_tokens(num_tokens: int) -> int:
    """Tokens of a chunk: enough for the device, and no more than there are."""
    return min(num_tokens, 256 if current_platform() == "cpu" else 4096)


def _num_blocks(count_C: jax.Array) -> jax.Array:
    return (jnp.max(count_C) + _BLOCK - 1) // _BLOCK


def _entries(block: jax.Array | int, first_C: jax.Array, count_C: jax.Array, num_entries: int) -> jax.Array:
    """int32 [C, E]: the entries of a block; `num_entries`, which is past the end, where a token has no more."""
    offset_E = block * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    return jnp.where(offset_E < count_C[:, None], first_C[:, None] + offset_E, num_entries)


def _rows(table_MD: jax.Array, entry_CE: jax.Array) -> jax.Array:
    return table_MD.at[entry_CE].get(mode="clip")


@functools.partial(CustomVjp, nondiff_argnums=(0,))
def attend_to_entries(
    scores: Scores,
    q_ND: jax.Array,
    ids_N: jax.Array,
    bounds: jax.Array,
    keys_MD: jax.Array,
    values_MD: jax.Array | None,
) -> jax.Array:
    """[N, D]: for each token, the values of its entries, weighted by the softmax of its scores; 0 if it has none.

    Args:
        bounds: int32 [vocab + 1], where the entries of each token begin, and where the last ones end.
        values_MD: None if the keys are the values too.
    """
    if trace_options().twice_differentiable:
        return _plain(scores, q_ND, ids_N, bounds, keys_MD, keys_MD if values_MD is None else values_MD)
    return _forward(scores, q_ND, ids_N, bounds, keys_MD, values_MD)[0]


def _plain(scores: Scores, q_ND, ids_N, bounds, keys_MD, values_MD) -> jax.Array:
    """The definition, with every token padded to the most entries, in chunks as large as the kernel's."""
    size = max(1, _chunk_tokens(len(ids_N)) * _BLOCK // scores.max_entries)

    @jax.checkpoint
    def chunk(tokens: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_CD, first_C, count_C = tokens
        offset_K = jnp.arange(scores.max_entries, dtype=jnp.int32)
        inside_CK = offset_K < count_C[:, None]
        entry_CK = jnp.where(inside_CK, first_C[:, None] + offset_K, 0)
        score_CK = jnp.where(inside_CK, scores.of(q_CD, keys_MD[entry_CK]), _NEVER)
        weight_CK = jnp.where(inside_CK, jax.nn.softmax(score_CK), 0.0)
        return jnp.einsum("ck,ckd->cd", weight_CK, values_MD[entry_CK].astype(jnp.float32)).astype(q_CD.dtype)

    first, count = bounds[ids_N], bounds[ids_N + 1] - bounds[ids_N]
    out = jax.lax.map(chunk, tuple(_chunks(part, size) for part in (q_ND, first, count)))
    return out.reshape(-1, q_ND.shape[1])[: len(ids_N)]


def _forward(scores: Scores, q_ND, ids_N, bounds, keys_MD, values_MD):
    tokens, num_entries = _Sorted.of(ids_N, bounds, _chunk_tokens(len(ids_N))), len(keys_MD)

    def chunk(arrays: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q_CD, first_C, count_C = arrays

        def step(block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            top_C, sum_C, out_CD = carry
            entry_CE = _entries(block, first_C, count_C, num_entries)
            inside_CE, k_CED = entry_CE < num_entries, _rows(keys_MD, entry_CE)
            score_CE = jnp.where(inside_CE, scores.of(q_CD, k_CED), _NEVER)
            new_top_C = jnp.maximum(top_C, score_CE.max(axis=1))
            weight_CE = jnp.where(inside_CE, jnp.exp(score_CE - new_top_C[:, None]), 0.0)
            before_C = jnp.exp(top_C - new_top_C)
            v_CED = k_CED if values_MD is None else _rows(values_MD, entry_CE)
            read_CD = jnp.einsum("ce,ced->cd", weight_CE, v_CED.astype(jnp.float32))
            return new_top_C, sum_C * before_C + weight_CE.sum(axis=1), out_CD * before_C[:, None] + read_CD

        start = jnp.full(q_CD.shape[:1], _NEVER), jnp.zeros(q_CD.shape[:1]), jnp.zeros(q_CD.shape)
        top_C, sum_C, out_CD = jax.lax.fori_loop(0, _num_blocks(count_C), step, start)
        sum_C = jnp.where(count_C > 0, sum_C, 1.0)
        return (out_CD / sum_C[:, None]).astype(q_CD.dtype), top_C + jnp.log(sum_C)

    out, lse = jax.lax.map(chunk, (tokens.chunks(q_ND), tokens.first, tokens.count))
    out_ND, lse_N = (checkpoint_name(tokens.unsorted(part), ATTENTION) for part in (out, lse))
    return out_ND, (q_ND, ids_N, bounds, keys_MD, values_MD, out_ND, lse_N)


def _backward(scores: Scores, residuals, d_out_ND: jax.Array):
    q_ND, ids_N, bounds, keys_MD, values_MD, out_ND, lse_N = residuals
    tokens, num_entries = _Sorted.of(ids_N, bounds, _chunk_tokens(len(ids_N))), len(keys_MD)
    delta_N = jnp.sum(d_out_ND.astype(jnp.float32) * out_ND.astype(jnp.float32), axis=1)

    def chunk(tables: tuple[jax.Array, jax.Array | None], arrays: tuple[jax.Array, ...]):
        q_CD, d_out_CD, lse_C, delta_C, first_C, count_C = arrays

        def step(block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array | None]):
            d_q_CD, d_keys_MD, d_values_MD = carry
            entry_CE = _entries(block, first_C, count_C, num_entries)
            k_CED = _rows(keys_MD, entry_CE).astype(jnp.float32)
            v_CED = k_CED if values_MD is None else _rows(values_MD, entry_CE).astype(jnp.float32)
            score_CE, pull = jax.vjp(scores.of, q_CD, k_CED)
            weight_CE = jnp.where(entry_CE < num_entries, jnp.exp(score_CE - lse_C[:, None]), 0.0)
            d_weight_CE = jnp.einsum("cd,ced->ce", d_out_CD, v_CED)
            d_q, d_k_CED = pull(weight_CE * (d_weight_CE - delta_C[:, None]))
            d_v_CED = weight_CE[..., None] * d_out_CD[:, None]
            if d_values_MD is None:
                d_k_CED = d_k_CED + d_v_CED
            else:
                d_values_MD = d_values_MD.at[entry_CE].add(d_v_CED, mode="drop")
            return d_q_CD + d_q, d_keys_MD.at[entry_CE].add(d_k_CED, mode="drop"), d_values_MD

        # In float32, so that the sums over blocks and tokens are not rounded after each.
        q_CD, d_out_CD = q_CD.astype(jnp.float32), d_out_CD.astype(jnp.float32)
        start = (jnp.zeros_like(q_CD), *tables)
        d_q_CD, d_keys_MD, d_values_MD = jax.lax.fori_loop(0, _num_blocks(count_C), step, start)
        return (d_keys_MD, d_values_MD), d_q_CD.astype(q_ND.dtype)

    columns = (*map(tokens.chunks, (q_ND, d_out_ND, lse_N, delta_N)), tokens.first, tokens.count)
    f32 = functools.partial(jnp.zeros, dtype=jnp.float32)
    empty = f32(keys_MD.shape), None if values_MD is None else f32(values_MD.shape)
    (d_keys_MD, d_values_MD), d_q = jax.lax.scan(chunk, empty, columns)
    d_values_MD = None if values_MD is None or d_values_MD is None else d_values_MD.astype(values_MD.dtype)
    return tokens.unsorted(d_q), None, None, d_keys_MD.astype(keys_MD.dtype), d_values_MD


attend_to_entries.defvjp(_forward, _backward)


Allocation = Literal["lzw", "nanochat", "uniform"]


def allocate(
    allocation: Allocation, sequences: Sequence[np.ndarray], vocab_size: int, num_entries: int, max_entries: int
) -> np.ndarray:
    """The number of entries of each token, int64 [vocab_size]: at least 1, at most `max_entries`, `num_entries` in all.

    Args:
        sequences: token ids. Codewords do not cross from one sequence to the next.
        num_entries: from `vocab_size` to `vocab_size * max_entries`.
    """
    assert vocab_size <= num_entries <= vocab_size * max_entries, (vocab_size, num_entries, max_entries)
    if allocation == "uniform":
        return np.diff(uniform_bounds(vocab_size, num_entries))
    if allocation == "nanochat":
        return _by_frequency(sequences, vocab_size, num_entries)
    return _along(codeword_ends(sequences, vocab_size), vocab_size, num_entries, max_entries)


def uniform_bounds(vocab_size: int, num_entries: int) -> np.ndarray:
    """Returns where each token's entries begin if all get the same number, give or take one: int64 [vocab_size + 1]."""
    return np.arange(vocab_size + 1) * num_entries // vocab_size


def _by_frequency(sequences: Sequence[np.ndarray], vocab_size: int, num_entries: int) -> np.ndarray:
    """Entries in rounds, the most frequent tokens first: the same number for all tokens, give or take one."""
    counts = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        # Every token counts once, and once more as the second of a pair.
        counts += np.bincount(sequence, minlength=vocab_size) + np.bincount(sequence[1:], minlength=vocab_size)
    per_token, rest = divmod(num_entries, vocab_size)
    entries = np.full(vocab_size, per_token)
    entries[np.argsort(-counts, kind="stable")[:rest]] += 1
    return entries


def _along(ends: np.ndarray, vocab_size: int, num_entries: int, max_entries: int) -> np.ndarray:
    """One entry for each token, then one for the last token of each codeword, the most frequent codewords first.

    A sample too small for the table has too few codewords. Then they are gone through again, as often as it takes.
    """
    entries = np.ones(vocab_size, np.int64)
    order = np.argsort(ends, kind="stable")
    first = np.searchsorted(ends[order], np.arange(vocab_size))
    occurrence = np.empty(len(ends), np.int64)  # how many codewords before end with the same token
    occurrence[order] = np.arange(len(ends)) - first[ends[order]]
    while left := num_entries - int(entries.sum()):
        allowed = ends[occurrence < (max_entries - entries)[ends]]
        entries += np.bincount(allowed[:left], minlength=vocab_size)
    return entries


def codeword_ends(sequences: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """The last token of each codeword of an LZW scan, the most frequent codewords first: int64 [codewords].

    All single tokens are codewords, so every token is there. Again and again, the scan reads the longest codeword that comes
    next, counts it, and makes a codeword of it and the token that follows. As in the paper, a codeword at the end of a
    sequence is counted anew, from 1.
    """
    counts, ends = [0] * vocab_size, list(range(vocab_size))
    children: dict[int, int] = {}  # number of a codeword * vocab_size + next token -> number of the longer codeword
    for sequence in sequences:
        tokens = sequence.tolist()
        length, start = len(tokens), 0
        while start + 1 < length:
            number, stop = tokens[start], start + 1
            edge = number * vocab_size + tokens[stop]
            longer = children.get(edge)
            while longer is not None and stop + 1 < length:
                number, stop = longer, stop + 1
                edge = number * vocab_size + tokens[stop]
                longer = children.get(edge)
            counts[number] += 1
            if longer is None:
                children[edge] = len(counts)
                counts.append(1)
                ends.append(tokens[stop])
            else:
                counts[longer] = 1
            start = stop + 1
    return np.asarray(ends)[np.argsort(-np.asarray(counts), kind="stable")]


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
    key_rules: ClassVar[Rules] = (only("max_entries", "sample_tokens", when="allocation", is_=("lzw", "nanochat")),)

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
        """Returns where the entries of each token begin, and where the last ones end, int32 [vocab + 1].

        Args:
            sequences: the sample of training tokens.
        """
        entries = allocate(self.allocation, sequences, vocab_size, num_entries, self.max_entries)
        return np.concatenate([[0], np.cumsum(entries)]).astype(np.int32)


class LookupLayer(DeclaresParameters):
    """Computes what a lookup layer adds to the residual stream.

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

    def parameters(self) -> dict[str, Parameter]:
        return {"keys_embedding": TABLE, "values_embedding": TABLE}

    def __call__(self, x: NamedArray, tokens: NamedArray) -> NamedArray:
        """Maps {batch, position, embed} and int {batch, position} to the shape of x."""
        up_proj, mix_proj = for_compute((self.up_proj, self.mix_proj))
        hidden = up_proj(self._read(self.norm(x), tokens))
        hidden = UnweightedRMSNorm(hidden.resolve_axis(LOOKUP_MLP), self.norm.eps)(hidden)
        mixed = hax.concatenate(LOOKUP_MIX, [hidden.rename({LOOKUP_MLP: LOOKUP_MIX}), x.rename({EMBED: LOOKUP_MIX})])
        return mix_proj(mixed.astype(x.dtype)).rearrange(x.axes)

    def _read(self, q: NamedArray, tokens: NamedArray) -> NamedArray:
        """Computes what the tokens read from their entries, {batch, position, embed}."""
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
