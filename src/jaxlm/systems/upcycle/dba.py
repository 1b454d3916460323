"""Decoupled bottleneck attention (DBA) in Llama's blocks: the model, and its form in Hugging Face folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import haliax as hax
import jax
from haliax import Axis

from jaxlm.core.axes import HEAD_SIZE, KEY_HEADS
from jaxlm.core.errors import ConfigError, check_divides
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.interop.hf.family import Family, FixedKey, JsonKey, KeyGroup
from jaxlm.interop.hf.shared_keys import usual_keys
from jaxlm.interop.hf.weights import BLOCK, Tensor, embeddings_and_head, pre_norms, single
from jaxlm.interop.hf.weights import gated_mlp as gated_mlp_tensors
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderBlock, check_sizes, gated_mlp, pre_norm_block
from jaxlm.models.decoders.pre_norm import PreNormConfig
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.decoupled_attention import DecoupledAttention, Gate, LearnedSlot, first_pairs
from jaxlm.models.rope import RotaryConfig, check_rope
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@choice(ModelConfig, "dba")
class DbaConfig(PreNormConfig):
    """Llama with decoupled bottleneck attention: a head's score is the sum of a semantic one, which does not depend on
    positions, and a geometric one, which rotary embeddings make depend on them. The surgery `decouple` makes such a model of
    another one.

    Attributes:
        sem_dim: semantic features of all query heads together; must divide by `num_heads`. 0 for none. A key has as many as a
            query head, whether it is shared or not.
        geo_dim: geometric features of all query heads together, an even number for each head. 0 for none.
        num_key_heads: number of key heads; must divide `num_kv_heads`, whose heads share them. Null means `num_kv_heads`. The
            cache keeps num_key_heads * (sem_dim + geo_dim) / num_heads + num_kv_heads * head_dim values for each token and
            layer.
        head_dim: features of a value, per head. Null means `hidden_dim / num_heads`.
        rotary_dim: the frequencies of the rotary embedding are those of this many features, of which each pair of geometric
            features has one. Null means the geometric features of a head. After surgery, it is the head size of the model
            before.
        rope_semantic: rotate semantic features too.
        tie_qk: semantic keys are the semantic queries. Needs as many key heads as query heads.
        gate: a gate for each query head that divides its score between the two: `static`, or `dynamic`, which depends on the
            token. Null divides it equally.
        null_slot: give each layer a key and a value of its own that all tokens attend to.
        attention_bias: add biases to the query, key and value projections.
        output_bias: add a bias to the output projection of attention. Null means `attention_bias`.
        mlp_bias: add biases to the MLP projections.
        hybrid_norm: also apply a norm to the output of attention and of the MLP, before it is added.
        use_layer_norm_weight: norms multiply by a weight.
    """

    sem_dim: NonNegativeInt = 1024
    geo_dim: NonNegativeInt = 2048
    num_key_heads: PositiveInt | None = None
    rotary_dim: PositiveInt | None = None
    rope_semantic: bool = False
    tie_qk: bool = False
    gate: Literal["static", "dynamic"] | None = None
    null_slot: bool = False
    attention_bias: bool = False
    output_bias: bool | None = None
    mlp_bias: bool = False
    hybrid_norm: bool = False
    use_layer_norm_weight: bool = True

    @property
    def SemSize(self) -> Axis:
        """Semantic features of a head."""
        return Axis(HEAD_SIZE, self.sem_dim // self.num_heads)

    @property
    def GeoSize(self) -> Axis:
        """Geometric features of a head."""
        return Axis(HEAD_SIZE, self.geo_dim // self.num_heads)

    @property
    def KeySize(self) -> Axis:
        """Features of a key, which may differ from those of a value (`HeadSize`)."""
        return Axis(HEAD_SIZE, self.SemSize.size + self.GeoSize.size)

    @property
    def KeyHeads(self) -> Axis:
        if self.num_key_heads is None or self.num_key_heads == self.KVHeads.size:
            return self.KVHeads
        return Axis(KEY_HEADS, self.num_key_heads)

    @property
    def RotarySize(self) -> Axis:
        return Axis(HEAD_SIZE, self.GeoSize.size if self.rotary_dim is None else self.rotary_dim)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return (LayerKind(self.rope if self.geo_dim else None, self.sliding_window),) * self.num_layers

    @property
    def rotary(self) -> RotaryConfig | None:
        return None if self.rope_semantic else super().rotary  # each layer has its own copy of it then

    @property
    def has_output_bias(self) -> bool:
        """Tells whether the output projection of attention has a bias."""
        return self.attention_bias if self.output_bias is None else self.output_bias

    def check(self) -> None:
        check_sizes(self)
        check_divides("model.num_key_heads", self.KeyHeads.size, "model.num_kv_heads", self.KVHeads.size)
        for key, value in (("sem_dim", self.sem_dim), ("geo_dim", self.geo_dim)):
            if value % self.num_heads:
                multiple = -(-value // self.num_heads) * self.num_heads
                raise ConfigError(
                    f"model.{key}: {value} given, which cannot be divided among {self.num_heads} heads. Set it to a multiple"
                    f" of {self.num_heads}, such as {multiple}"
                )
        if not self.sem_dim and not self.geo_dim:
            raise ConfigError("model.sem_dim: 0 given, and geo_dim too. Attention needs at least one of them above 0")
        if self.GeoSize.size % 2 or (self.rope_semantic and self.SemSize.size % 2):
            key, size = ("geo_dim", self.GeoSize.size) if self.GeoSize.size % 2 else ("sem_dim", self.SemSize.size)
            raise ConfigError(
                f"model.{key}: {size * self.num_heads} given, so each of {self.num_heads} heads has {size}. Rotary"
                f" embeddings need an even number of features: set it to {(size + 1) * self.num_heads}"
            )
        if self.GeoSize.size:
            check_rope(self.rope, self.num_heads, self.RotarySize.size)
            rotated, shares = self.rope.num_rotated(self.RotarySize.size), self.KVHeads.size // self.KeyHeads.size
            if self.GeoSize.size > rotated * shares:
                sharing = f", {shares} times because as many heads share a key" if shares > 1 else ""
                raise ConfigError(
                    f"model.geo_dim: {self.geo_dim} given, {self.GeoSize.size} features for each of {self.num_heads} heads,"
                    f" but the rotary embedding has frequencies for {rotated} (rotary_dim){sharing}. Give fewer"
                )
        if self.tie_qk and (self.KeyHeads.size != self.num_heads or not self.sem_dim):
            keys = "key/value" if self.KeyHeads == self.KVHeads else "key"
            raise ConfigError(
                f"model.tie_qk: true given, which needs semantic features (sem_dim is {self.sem_dim}) and as many {keys}"
                f" heads ({self.KeyHeads.size}) as query heads ({self.num_heads})"
            )

    def attention(self, keys: jax.Array) -> DecoupledAttention:
        k_semantic, k_geometric, k_value, k_out = keys
        semantic, geometric = (
            self._queries_and_keys(self.SemSize, k_semantic),
            self._queries_and_keys(self.GeoSize, k_geometric),
        )
        Values, bias = (self.KVHeads, self.HeadSize), self.attention_bias
        std, Inputs = self.initializer_range, (self.Heads, self.HeadSize)
        num_pairs, num_frequencies = self.GeoSize.size // 2, self.rope.num_rotated(self.RotarySize.size) // 2
        return DecoupledAttention(
            semantic[0],
            None if self.tie_qk else semantic[1],
            *geometric,
            Linear.init(self.Embed, Values, std=std, key=k_value, use_bias=bias),
            Linear.init(Inputs, self.Embed, std=std, key=k_out, use_bias=self.has_output_bias),
            first_pairs(self.KeyHeads, num_pairs, num_frequencies) if num_pairs else None,
            None if self.gate is None else Gate.init(self.Heads, self.Embed, dynamic=self.gate == "dynamic"),
            LearnedSlot(hax.zeros((self.KeyHeads, self.KeySize)), hax.zeros(Values)) if self.null_slot else None,
            self.rope if self.rope_semantic else None,
        )

    def _queries_and_keys(self, Size: Axis, key: jax.Array) -> tuple[Linear | None, Linear | None]:
        """Projections to `Size` features of each query head and each key head; none for no features."""
        if not Size.size:
            return None, None
        std, bias = self.initializer_range, self.attention_bias
        heads: Iterator[tuple[Axis, jax.Array]] = zip((self.Heads, self.KeyHeads), jax.random.split(key), strict=True)
        q, k = (Linear.init(self.Embed, (axis, Size), std=std, key=key, use_bias=bias) for axis, key in heads)
        return q, k

    def block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        return pre_norm_block(self, self.attention(keys[:4]), gated_mlp(self, keys[4:], use_bias=self.mlp_bias))


def _tensors(config: DbaConfig) -> Iterator[Tensor]:
    yield from embeddings_and_head(config)
    yield from pre_norms()
    theirs, ours = "model.layers.{layer}.self_attn.", f"{BLOCK}attn."
    projections, keys = {"v_proj": "kv_heads head_size"}, config.KeyHeads.name
    if config.sem_dim:
        projections["q_sem"] = "heads head_size"
        if not config.tie_qk:
            projections["k_sem"] = f"{keys} head_size"
    if config.geo_dim:
        projections |= {"q_geo": "heads head_size", "k_geo": f"{keys} head_size"}
        yield single(f"{theirs}rotary_pairs", f"{ours}pairs", f"{keys} | rotary_pairs")
    for name, out in projections.items():
        yield single(f"{theirs}{name}.weight", f"{ours}{name}.weight", f"{out} | embed")
        if config.attention_bias:
            yield single(f"{theirs}{name}.bias", f"{ours}{name}.bias", out)
    yield single(f"{theirs}o_proj.weight", f"{ours}o_proj.weight", "embed | heads head_size")
    if config.has_output_bias:
        yield single(f"{theirs}o_proj.bias", f"{ours}o_proj.bias", "embed")
    if config.gate is not None:
        yield single(f"{theirs}gate_logits", f"{ours}gate.logits", "heads")
    if config.gate == "dynamic":
        yield single(f"{theirs}gate_proj.weight", f"{ours}gate.proj.weight", "heads | embed")
    if config.null_slot:
        yield single(f"{theirs}null_key", f"{ours}null_slot.keys", f"{keys} | head_size")
        yield single(f"{theirs}null_value", f"{ours}null_slot.values", "kv_heads | head_size")
    yield from gated_mlp_tensors(use_bias=config.mlp_bias)


FAMILY = Family(
    model_types=("jaxlm_dba",),
    architecture="DbaForCausalLM",
    config=DbaConfig,
    keys=(
        *usual_keys(length=2048),
        *(JsonKey(name, name, 0) for name in ("sem_dim", "geo_dim")),
        JsonKey("num_key_heads", "num_key_heads", None),
        JsonKey("rotary_dim", "rotary_dim", None),
        JsonKey("gate", "gate", None),
        *(
            JsonKey(name, name, False)
            for name in ("rope_semantic", "tie_qk", "null_slot", "attention_bias", "mlp_bias")
        ),
        KeyGroup(
            ("output_bias",),
            lambda theirs: {"output_bias": theirs.get("output_bias", False)},
            lambda config: {"output_bias": config.has_output_bias},
        ),
        JsonKey("sliding_window", "sliding_window", None),
        FixedKey("attention_dropout", 0.0),
    ),
    tensors=lambda config: tuple(_tensors(config)),
    modeling=Path(__file__).with_name("modeling_jaxlm_dba.py"),
    respelled=("output_bias",),
)
