"""Gives a model decoupled bottleneck attention that computes what its attention computes, as well as few features can.

How few features approximate scores is `jaxlm.systems.upcycle.bottleneck`. Values and outputs stay as they are: a head's
values are those of its key/value head.

The keys of several heads may become one key that their queries share, turned so that few of its features matter (RoRoPE).
All features of N heads side by side are one key: a query that belongs to one of them is zero elsewhere. Rotary embeddings
turn the pairs of a frequency by the same angle in all heads. So an orthogonal N x N matrix for each frequency may mix them:
queries and keys that the same matrix mixes have the same scores at every distance. The principal components of the keys
concentrate what the heads have in common in the first mixed pairs.

Two things differ from the paper. With a pair as a complex number, a rotary embedding is a factor e^(i angle), which a
unitary matrix leaves alone as an orthogonal one does: heads may have the same features at other phases. And keys are first
multiplied by the size of the queries that meet them, and queries divided by it, which changes no score either. Keys are
then as large as the scores that they make: if queries have no preferred direction, no other unitary matrix leaves less
outside the first pairs.

Source: shared keys: Meng et al. 2025, "TransMLA: Multi-Head Latent Attention Is All You Need" (arXiv:2502.07864), section
4.2.

Shapes: as in `jaxlm.systems.upcycle.bottleneck`, with K shared keys, N key/value heads that share one, J their mixtures.
"""

import functools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, HEAD_SIZE, HEADS, KEY_HEADS, KV_HEADS, LAYERS, POSITION, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.core.rules import Rules, only
from jaxlm.core.sharding import current_layout
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.core.values.logged import LayerTable
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig, vocab_axis
from jaxlm.models.decoder import Decoder, DecoderBlock
from jaxlm.models.layers import GatedMlp
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention, other_mixer
from jaxlm.models.norms import RMSNorm, UnweightedRMSNorm
from jaxlm.models.rope import Places, RotaryConfig
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants
from jaxlm.surgery.input_moments import InputMoments, by_layer, heads_of_layers, input_moments, moment_of_layers
from jaxlm.systems.upcycle.bottleneck import (
    Bottleneck,
    HeadFeatures,
    ScoreErrors,
    Scores,
    independent,
    kept_rotation,
    largest_pairs,
    lost_rotation,
    low_rank,
    most_turned_pairs,
    scaled,
    score_errors,
    second_root,
    zero_padded,
)
from jaxlm.systems.upcycle.dba import DbaConfig

_SMALLEST_SIZE = 1e-3  # of the mean size of queries
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def in_shared_keys(teacher: Scores, features: HeadFeatures, num_keys: int, moment_II: jax.Array) -> Scores:
    """The same scores with `num_keys` keys, each of all features of the heads that share it, which `of_shared_keys` lists.
    The pairs of each frequency are mixed, the largest mixture comes first. Args: moment_II: second moment of the inputs.
    """
    num_heads, (num_values, size, num_inputs) = teacher.q_HDI.shape[0], teacher.k_GDI.shape
    shared = num_values // num_keys
    q_KNMDI = teacher.q_HDI.reshape(num_keys, shared, num_heads // num_values, size, num_inputs)
    k_KNDI = teacher.k_GDI.reshape(num_keys, shared, size, num_inputs)
    first, second = (jnp.asarray(part) for part in (features.first, features.second))
    q_KNMPI, k_KNPI = (w[..., first, :] + 1j * w[..., second, :] for w in (q_KNMDI, k_KNDI))
    sizes_KNP = _relative(_einsum("knmpi,ij,knmpj->knp", q_KNMPI, moment_II, q_KNMPI.conj()).real)
    q_KNMPI, k_KNPI = q_KNMPI / sizes_KNP[:, :, None, :, None], k_KNPI * sizes_KNP[..., None]
    moments_KPNN = _einsum("knpi,ij,kopj->kpno", k_KNPI, moment_II, k_KNPI.conj())
    _, mixtures_KPNJ = jnp.linalg.eigh(moments_KPNN)
    mixtures_KPNJ = mixtures_KPNJ[..., ::-1].conj()
    k_KJPI = _einsum("kpnj,knpi->kjpi", mixtures_KPNJ, k_KNPI)
    q_KNMJPI = _einsum("kpnj,knmpi->knmjpi", mixtures_KPNJ, q_KNMPI)
    # Features without rotation stay those of their head: no approximation that follows depends on how they are mixed.
    q_KNMJDI = q_KNMDI[:, :, :, None] * jnp.eye(shared)[:, None, :, None, None]
    q_KNMJDI = q_KNMJDI.at[..., first, :].set(q_KNMJPI.real).at[..., second, :].set(q_KNMJPI.imag)
    k_KJDI = k_KNDI.at[..., first, :].set(k_KJPI.real).at[..., second, :].set(k_KJPI.imag)
    width = shared * size
    return Scores(q_KNMJDI.reshape(num_heads, width, num_inputs), k_KJDI.reshape(num_keys, width, num_inputs))


def of_shared_keys(features: HeadFeatures, head_size: int, shared: int) -> HeadFeatures:
    """Returns where a key of `shared` heads has its features. Pair j P + p is mixture j of those with frequency p."""

    def of_heads(part: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(head * head_size + feature for head in range(shared) for feature in part)

    first, second, unrotated = map(of_heads, (features.first, features.second, features.unrotated))
    return HeadFeatures(first, second, unrotated, features.amplitude)


def _relative(squares_KNP: jax.Array) -> jax.Array:
    """Roots of these sums of squares, relative to the mean over the heads that share a key; never 0."""
    mean_K1P = jnp.mean(squares_KNP, axis=1, keepdims=True)
    ratio_KNP = jnp.where(mean_K1P > 0, squares_KNP / jnp.where(mean_K1P > 0, mean_K1P, 1.0), 1.0)
    return jnp.sqrt(jnp.maximum(ratio_KNP, _SMALLEST_SIZE**2))


Method = Literal["svd_joint", "whitened", "transmla", "exact", "svd_independent", "random", "fresh"]
PairRule = Literal["rotation", "contribution"]
_QUERIES = "body.layers.stacked.attn.q_proj"
_FRESH_OUTPUT = 0.02
_WHITENED: tuple[Method, ...] = ("whitened", "transmla")
_SHARE_KEYS: tuple[Method, ...] = ("transmla", "random", "fresh")


@choice(SurgeryConfig, "decouple")
class DecoupleConfig(SurgeryConfig):
    """Replaces the attention of a model with Llama's blocks by decoupled bottleneck attention (`model.type: dba`), for good.
    All other weights stay as they are.

    Attributes:
        sem_dim, geo_dim: semantic and geometric features of all query heads together, as in `model.type: dba`.
        method: where queries and keys come from. `svd_joint`: some rotary pairs of each head stay as they are (`pairs`), and
            the product of all other features, which lose their rotation, is replaced by its best approximation.
            `whitened`: the best for the data, not for all inputs alike. `transmla`: likewise, after the features of heads
            that share a key (`num_key_heads`) are mixed at equal frequencies, so that few of them matter. `exact`: the same
            scores; needs as many features as the model has. `svd_independent` decomposes queries and keys separately, which
            preserves nothing, for comparison. `random`: new ones. `fresh`: new ones, and outputs that start small.
        calibration_batches: training batches on which the inputs of each layer are measured; they choose the pairs, and
            `whitened` and `transmla` the approximation. The log has the errors of the scores by layer. 0 measures nothing.
        pairs: which rotary pairs stay. `rotation`: those whose scores change most without their rotation. `contribution`:
            those with the largest scores, the rule of MHA2MLA.
        num_key_heads: as in `model.type: dba`; null means 1 for `transmla`. Only for `transmla`, and for new queries and keys
            (`random`, `fresh`).
        gate: as in `model.type: dba`.
        null_slot: as in `model.type: dba`.
    """

    sem_dim: NonNegativeInt
    geo_dim: NonNegativeInt
    method: Method = "svd_joint"
    calibration_batches: NonNegativeInt | None = None
    pairs: PairRule = "rotation"
    num_key_heads: PositiveInt | None = None
    gate: Literal["static", "dynamic"] | None = None
    null_slot: bool = False

    key_rules: ClassVar[Rules] = (
        only("num_key_heads", when="method", is_=_SHARE_KEYS, why="in which heads share keys"),
    )

    def changed(self, config: ModelConfig) -> ModelConfig:
        teacher = _teacher(config)
        changed = DbaConfig(
            **{name: getattr(config, name) for name in _shared_fields(config)},
            rope=replace(teacher.rope, partial_rotary_factor=1.0),
            sliding_window=teacher.kind.window,
            sem_dim=self.sem_dim,
            geo_dim=self.geo_dim,
            num_key_heads=1 if self.num_key_heads is None and self.method == "transmla" else self.num_key_heads,
            rotary_dim=teacher.rope.num_rotated(teacher.head_size),
            gate=self.gate,
            null_slot=self.null_slot,
            attention_bias=teacher.attention.q_proj.bias is not None,
            output_bias=teacher.attention.o_proj.bias is not None,
            mlp_bias=teacher.block.mlp.up_proj.bias is not None,
        )
        try:
            changed.check()
            self._check_sizes(changed, teacher)
        except ConfigError as error:
            raise ConfigError(f"surgery decouple: {str(error).removeprefix('model.')}") from error
        return changed

    def _check_sizes(self, changed: DbaConfig, teacher: "_Teacher") -> None:
        """Raises `ConfigError` if the scores cannot be made, or be exact, with these sizes."""
        num_rotated, num_unrotated = 2 * teacher.features.num_pairs, len(teacher.features.unrotated)
        heads = changed.num_heads
        if self.method == "exact" and (changed.GeoSize.size < num_rotated or changed.SemSize.size < num_unrotated):
            raise ConfigError(
                f"method: exact given, but the model has {num_rotated} rotated and {num_unrotated} other features in each of"
                f" {heads} heads. Set geo_dim: {num_rotated * heads} and sem_dim: {num_unrotated * heads}, or another method"
            )
        if self.method in _WHITENED and self.calibration_batches == 0:
            raise ConfigError(f"method: {self.method} given with calibration_batches: 0. Set at least 1")

    @property
    def wants(self) -> Wants:
        measures = self.method in ("svd_joint", *_WHITENED)
        num_batches = 8 if self.calibration_batches is None else self.calibration_batches
        return Wants(num_batches=measures * num_batches, measure=self.measure, describe=self.describe)

    def measure(self, model: LanguageModel, batch: TokenBatch) -> InputMoments:
        return input_moments(model, [_QUERIES], Inputs.of(batch))[_QUERIES]

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        config, before = _config_of(model), _attention_before(model)
        new = _with_old_leaves(self.changed(config).build(model.Vocab, key=key), model)
        if self.method == "random":
            return new
        if self.method == "fresh":
            return _with_attention(new, o_proj={"weight": before.o_proj.weight * _FRESH_OUTPUT})
        return self._filled(new, before, _teacher(config), None)

    def fill(self, model: LanguageModel, before: LanguageModel, *, sums: Any, **_: Any) -> LanguageModel:
        return self._filled(model, _attention_before(before), _teacher(_config_of(before)), sums)

    def describe(self, model: LanguageModel, sums: InputMoments) -> LayerTable:
        """The errors of the scores by layer, of un-rotation and of rank."""
        config, layout = _config_of(model), current_layout()
        replicated = None if layout is None else layout.replicated()
        errors = jax.jit(self.errors, out_shardings=replicated)(model, sums)
        signal, unrotated, cut = (np.asarray(error) for error in errors)
        num_tokens = int(np.asarray(sums.count.array).ravel()[0])
        title = (
            f"errors of the scores, relative to the scores, over {num_tokens:,} tokens at distances up to"
            f" {config.seq_len:,}"
        )
        rows = np.stack([unrotated / signal, cut / signal], axis=1).tolist()
        return LayerTable("decouple", title, ("un-rotation", "rank"), rows)

    def errors(self, model: LanguageModel, sums: InputMoments) -> ScoreErrors:
        """The errors of the bottleneck of every layer [layers]. Traced. Args: model: before the surgery."""
        teacher = _teacher(_config_of(model))

        def of_layer(q_HDI: jax.Array, k_GDI: jax.Array, moment_II: jax.Array) -> ScoreErrors:
            known = self._keys(teacher, Scores(q_HDI, k_GDI), moment_II)
            pairs_GP, sem = self._semantic(known, moment_II)
            return score_errors(known.scores, known.features, pairs_GP, sem, moment_II, known.angles_P, teacher.seq_len)

        return by_layer(of_layer, *_of_layers(_attention_before(model), sums))

    def merge(self, model: LanguageModel) -> LanguageModel:
        return model

    def _filled(
        self, model: LanguageModel, attention: SelfAttention, teacher: "_Teacher", moments: InputMoments | None
    ) -> LanguageModel:
        """The model with queries and keys from the teacher's. Args: moments: of the layers' inputs, if measured."""
        made = by_layer(lambda *of_layer: self._bottleneck(teacher, *of_layer), *_of_layers(attention, moments))
        return _with_attention(model, **_parameters(_block_of(model).attn, made))

    def _bottleneck(self, teacher: "_Teacher", q_HDI: jax.Array, k_GDI: jax.Array, moment_II: jax.Array) -> Bottleneck:
        """The bottleneck of one layer. Args: moment_II: second moment of the inputs."""
        teacher_scores, num_frequencies = Scores(q_HDI, k_GDI), teacher.features.num_pairs
        if self.method == "svd_independent":
            heads = q_HDI.shape[0]
            return independent(teacher_scores, self.sem_dim // heads, self.geo_dim // heads, num_frequencies)
        known = self._keys(teacher, teacher_scores, moment_II)
        pairs_GP, sem = self._semantic(known, moment_II)
        geo = kept_rotation(known.scores, known.features, pairs_GP)
        return Bottleneck(scaled(sem, teacher.scale), scaled(geo, teacher.scale), pairs_GP % num_frequencies)

    def _keys(self, teacher: "_Teacher", scores: Scores, moment_II: jax.Array) -> "_Keys":
        """The teacher's keys, or what it has instead where heads share them."""
        angles_P, features = _angles(teacher), teacher.features
        if self.method != "transmla":
            return _Keys(scores, features, angles_P, teacher.seq_len)
        num_keys = self.num_key_heads or 1
        shared = scores.k_GDI.shape[0] // num_keys
        return _Keys(
            in_shared_keys(scores, features, num_keys, moment_II),
            of_shared_keys(features, teacher.head_size, shared),
            jnp.tile(angles_P, shared),
            teacher.seq_len,
        )

    def _semantic(self, keys: "_Keys", moment_II: jax.Array) -> tuple[jax.Array, Scores]:
        """The pairs that keep their rotation [G, P], and the semantic features without a scale."""
        heads = keys.scores.q_HDI.shape[0]
        sem_size, num_pairs = self.sem_dim // heads, self.geo_dim // heads // 2
        if self.pairs == "contribution":
            pairs_GP = largest_pairs(keys.scores, keys.features, moment_II, num_pairs)
        else:
            pairs_GP = most_turned_pairs(keys.scores, keys.features, moment_II, keys.angles_P, keys.seq_len, num_pairs)
        lost, _ = lost_rotation(keys.scores, keys.features, pairs_GP)
        if lost.k_GDI.shape[1] <= sem_size:
            return pairs_GP, zero_padded(lost, sem_size)
        return pairs_GP, low_rank(lost, sem_size, second_root(moment_II) if self.method in _WHITENED else None)


class _Teacher(NamedTuple):
    """Holds what a surgery must know of a model that it changes."""

    block: DecoderBlock
    attention: SelfAttention
    kind: LayerKind
    rope: RotaryConfig
    head_size: int
    features: HeadFeatures
    scale: float
    seq_len: int


class _Keys(NamedTuple):
    """The keys of one layer that are approximated.

    Attributes:
        scores: the teacher's, for all distances.
        features: where a key has its features.
        angles_P: radians per position of each pair.
        seq_len: tokens of a row.
    """

    scores: Scores
    features: HeadFeatures
    angles_P: jax.Array
    seq_len: int


def _teacher(config: ModelConfig) -> _Teacher:
    """Raises `ConfigError` if no `DbaConfig` describes the model with other attention."""
    model = jax.eval_shape(lambda: config.build(vocab_axis(16), key=jax.random.key(0)))
    problem = _problem(model)
    if problem is not None:
        name = type(config).__name__.removesuffix("Config").lower()
        raise ConfigError(
            f"surgery decouple: a model of type {name} given, but {problem}. Expected Llama's blocks: RMSNorms before"
            " attention and MLP, rotary embeddings, a gated MLP"
        )
    block, (kind, *_) = _block_of(model), model.body.kinds_by_layer
    attention: Any = block.attn
    head_size = config.HeadSize.size  # pyright: ignore[reportAttributeAccessIssue]
    rope = kind.rope
    assert rope is not None, "_problem"
    num_rotated = rope.num_rotated(head_size)
    features = HeadFeatures.of(head_size, num_rotated, interleaved=kind.interleaved, amplitude=rope.amplitude)
    scale = head_size**-0.5 if attention.scale is None else attention.scale
    return _Teacher(block, attention, kind, rope, head_size, features, scale, config.seq_len)


def _angles(teacher: _Teacher) -> jax.Array:
    """Radians per position of each pair of features, for a text of the full length."""
    rope, Pos = teacher.rope, hax.Axis(POSITION, teacher.seq_len)
    positions = hax.arange(Pos).broadcast_axis(hax.Axis(BATCH, 1))
    exact = rope.frequencies(rope.num_rotated(teacher.head_size), Places(positions, positions * 0 + 1))
    frequencies = jnp.asarray(exact, jnp.float32)
    return frequencies[0, -1] if frequencies.ndim == 3 else frequencies


def _problem(model: LanguageModel) -> str | None:
    """Explains why no `DbaConfig` describes the model with other attention."""
    if not isinstance(model, Decoder):
        return "its layers are not known"
    if kind := other_mixer(model):
        return f"some of its layers are {kind}, which has no scores"
    if len(model.body.stacks) > 1 or not isinstance(_block_of(model).mlp, GatedMlp):
        return "its MLPs are not all of the same kind, with a gate and without experts"
    block, attention, kinds = _block_of(model), _block_of(model).attn, set(model.body.kinds_by_layer)
    if not isinstance(block, DecoderBlock):
        return f"its layers are {type(block).__name__}"
    if not isinstance(attention, SelfAttention):
        return f"its attention is {type(attention).__name__}"
    problems = {
        "its layers have different windows or rotary embeddings": len(kinds) > 1,
        "it has no rotary embeddings": any(kind.rope is None for kind in kinds),
        "its scores grow with the position of the query": any(kind.query_scaling is not None for kind in kinds),
        "its queries and keys have norms, so scores are not products of linear maps": attention.q_norm is not None,
        "its queries, keys and values are clipped": attention.clip_qkv is not None,
        f"its scores have {attention.rule}": not attention.rule.is_identity,
        "its tokens attend to later ones": not attention.causal,
        "its heads have a gate": attention.gate_proj is not None,
        "its heads have sinks": attention.sinks is not None,
        "it has dropout": max(attention.dropout, block.dropout, model.embed_dropout) > 0,
        "its attention and MLP read the same input": block.parallel,
        "the outputs of its layers are scaled": block.residual_scale != 1.0,
        "its embeddings are scaled or have a norm": model.embed_scale is not None or model.embed_norm is not None,
        "its logits are scaled or capped": model.final_scale is not None or model.traits.logit_soft_cap is not None,
        "its norms are not RMSNorms": not _is_rms(block.attn_norm) or not _is_rms(block.mlp_norm),
        "it has norms after attention and MLP": (block.attn_post_norm is not None) != model.config.hybrid_norm,
    }
    return next((problem for problem, applies in problems.items() if applies), None)


def _is_rms(norm: Any) -> bool:
    return isinstance(norm, UnweightedRMSNorm) or (isinstance(norm, RMSNorm) and not norm.offset)


def _shared_fields(config: ModelConfig) -> Sequence[str]:
    """Keys that mean the same in both configs. What follows from the modules is left out."""
    from_modules = ("rope", "sliding_window", "attention_bias", "output_bias", "mlp_bias")
    known = {field.name for field in fields(DbaConfig)} - set(from_modules)
    return [field.name for field in fields(config) if field.name in known]  # pyright: ignore[reportArgumentType]


def _block_of(model: LanguageModel) -> DecoderBlock:
    """The blocks of a model with one stack; their arrays have the axis `layers`."""
    return model.body.stacks[0].layers.stacked  # pyright: ignore[reportAttributeAccessIssue]


def _config_of(model: LanguageModel) -> ModelConfig:
    if not isinstance(model, Decoder) or model.body.splits:
        raise ConfigError("surgery decouple: the layers of this model are cut or not known. Put it before split_at")
    return model.config


def _attention_before(model: LanguageModel) -> Any:
    """The attention that the surgery replaces. Raises `ConfigError` if its weights are not plain arrays."""
    attention: Any = _block_of(model).attn
    for layer in (attention.q_proj, attention.k_proj):
        if not (isinstance(layer, Linear) and isinstance(layer.weight, NamedArray)):
            raise ConfigError(
                "surgery decouple: the queries and keys of this model have adapters or stored weights. Merge them before"
            )
    return attention


def _with_old_leaves(new: LanguageModel, old: LanguageModel) -> LanguageModel:
    """A new model with the leaves of an old one that have the same path and axes."""
    leaves = dict(tree.leaves(old))
    form = lambda leaf: getattr(leaf, "axes", leaf.shape)  # noqa: E731
    kept = lambda path, leaf: leaves[path] if path in leaves and form(leaves[path]) == form(leaf) else leaf  # noqa: E731
    return tree.map_leaves(kept, new)


def _with_attention(model: LanguageModel, **changes: Any) -> LanguageModel:
    prefix = "body.layers.stacked.attn."
    leaves = {
        f"{prefix}{name}.{path}".rstrip("."): leaf for name, part in changes.items() for path, leaf in tree.leaves(part)
    }
    return tree.map_leaves(lambda path, leaf: leaves.get(path, leaf), model)


def _of_layers(attention: Any, moments: InputMoments | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [L, H, D, I], keys [L, G, D, I], and moments of inputs [L, I, I]."""
    queries, keys = heads_of_layers(attention.q_proj, HEADS), heads_of_layers(attention.k_proj, KV_HEADS)
    return queries, keys, moment_of_layers(attention.q_proj, moments)


def _parameters(attention: Any, made: Bottleneck) -> dict[str, Any]:
    """The projections of stacked layers with these values, by field name."""
    layers = {
        "q_sem": (attention.q_sem, made.sem.q_HDI),
        "k_sem": (attention.k_sem, made.sem.k_GDI),
        "q_geo": (attention.q_geo, made.geo.q_HDI),
        "k_geo": (attention.k_geo, made.geo.k_GDI),
    }
    changes: dict[str, Any] = {
        name: _projection(layer, array) for name, (layer, array) in layers.items() if layer is not None
    }
    if attention.pairs is not None:
        changes["pairs"] = {"": NamedArray(made.pairs_GP, attention.pairs.axes)}
    return changes


def _projection(layer: Linear, array: jax.Array) -> dict[str, NamedArray]:
    """Weight and bias of a projection. Args: array: [layers, heads, features, inputs]."""
    Layers, Heads, Size, Embed = (layer.weight.resolve_axis(name) for name in (LAYERS, _heads(layer), HEAD_SIZE, EMBED))
    weight = NamedArray(array[..., : Embed.size], (Layers, Heads, Size, Embed)).rearrange(layer.weight.axes)
    if layer.bias is None:
        return {"weight": weight}
    return {"weight": weight, "bias": NamedArray(array[..., -1], (Layers, Heads, Size)).rearrange(layer.bias.axes)}


def _heads(layer: Linear) -> str:
    names = {axis.name for axis in axes_of(layer.Out)}
    return next(name for name in (HEADS, KV_HEADS, KEY_HEADS) if name in names)
