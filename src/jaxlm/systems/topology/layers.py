"""The tree that a model is written as: layers, each of which is a layer of another family, and what groups them.

A layer is made for the features that come in. The families' configs check its keys and initialize its parameters.
"""

import abc
import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import draccus
import equinox as eqx
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED, MLP
from jaxlm.core.errors import ConfigError, check_at_least, check_choice
from jaxlm.core.field_types import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields
from jaxlm.core.rules import Rules, excludes, needs, only
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.models.activations import ACTIVATIONS
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import check_sizes, gated_mlp, plain_mlp
from jaxlm.models.decoders.moe_decoder import experts
from jaxlm.models.layers import GatedMlp, Mlp, dropout
from jaxlm.models.linear import Linear
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.mixers.decoupled_attention import DecoupledAttention
from jaxlm.models.moe import Experts
from jaxlm.models.norms import LayerNorm, RMSNorm, UnweightedLayerNorm, UnweightedRMSNorm
from jaxlm.models.rope import DefaultRotary, RotaryConfig
from jaxlm.models.stacks import LayerKind
from jaxlm.reading.choices import choice


@dataclass(frozen=True)
class Node(draccus.ChoiceRegistry, abc.ABC):
    """A layer, or a group of them. `type:` says which."""


class GroupNode(Node):
    """Nodes that run one after the other."""

    layers: list[Node]

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))  # the config is a static field: it must be hashable


@choice(Node, "stacked")
class StackedNode(GroupNode):
    """Runs its layers one after the other.

    Attributes:
        layers: layers and groups of layers, from first to last.
    """

    layers: list[Node] = field(kw_only=True)


@choice(Node, "nested")
class NestedNode(GroupNode):
    """Repeats a unit of layers. Each repetition has its own parameters. They run as one scan.

    Attributes:
        layers: layers and groups of layers of the unit, from first to last.
        repeat: number of repetitions.
    """

    layers: list[Node] = field(kw_only=True)
    repeat: PositiveInt = 1


@choice(Node, "residual")
class ResidualNode(GroupNode):
    """x + f(x), where f runs the layers one after the other. For pre-norm, the first of them is a norm.

    Attributes:
        layers: layers and groups of layers of f, from first to last. The last one has as many output features as come in.
    """

    layers: list[Node] = field(kw_only=True)


@dataclass(frozen=True)
class LayerNode(Node):
    """A layer.

    Attributes:
        hidden_dim: features of the input. Null means what comes in; any other number must be the same.
    """

    hidden_dim: PositiveInt | None = None
    role: ClassVar[str]
    """The name of its parameters in their paths."""

    def check(self, width: int, path: str) -> None:
        """Raises `ConfigError`, which names `path`, if there is no such layer for an input of `width` features."""
        check_fields(self, path)
        if self.hidden_dim not in (None, width):
            raise ConfigError(
                f"{path}.hidden_dim: {self.hidden_dim} given, but {width} features come in. Remove it, set it to {width}, or"
                " change what is before it"
            )
        self.check_keys(width, path)

    def check_keys(self, width: int, path: str) -> None:
        """Raises `ConfigError` if the keys do not suit each other, or an input of `width` features."""

    def output_width(self, width: int) -> int:
        """Features of the output, for an input of `width` features."""
        return width

    @abc.abstractmethod
    def init(self, width: int, std: float, *, key: jax.Array) -> Any:
        """Initializes the layer for `width` features, with weights of this standard deviation."""


_DECOUPLED = ("sem_dim", "geo_dim", "rotary_dim", "num_key_heads", "rope_semantic", "tie_qk", "gate", "null_slot")


@choice(Node, "attention")
class AttentionNode(LayerNode):
    """Causal self-attention.

    Attributes:
        mode: `standard` has a key/value head for each query head; in `gqa`, query heads may share one; `decoupled` is the
            attention of the family `dba`.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; must divide `num_heads`. Null means `num_heads`.
        head_dim: features per head; in mode `decoupled`, those of a value. Null means the input's features divided by
            `num_heads`.
        rope: rotary position embedding of queries and keys. Null for none.
        sliding_window: number of tokens that each token attends to, including itself. Null means all previous tokens.
        bias: add biases to the query, key and value projections.
        output_bias: add a bias to the output projection. Null means `bias`.
        dropout: dropout probability of the attention weights. Not in mode `decoupled`.
        sem_dim, geo_dim: semantic and geometric features of all query heads together, 0 for none. Mode `decoupled` needs
            both, and other modes have neither.
        rotary_dim: the frequencies of the rotary embedding are those of this many features. Null means the geometric features
            of a head. Only in mode `decoupled`, like the keys below.
        num_key_heads: number of key heads; must divide `num_kv_heads`, whose heads share them. Null means `num_kv_heads`.
        rope_semantic: rotate semantic features too.
        tie_qk: semantic keys are the semantic queries. Needs as many key heads as query heads.
        gate: a gate for each query head that divides its score between the two: `static`, or `dynamic`, which depends on the
            token. Null divides it equally.
        null_slot: give the layer a key and a value of its own that all tokens attend to.
    """

    mode: Literal["standard", "gqa", "decoupled"] = "gqa"
    num_heads: PositiveInt = field(kw_only=True)
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rope: RotaryConfig | None = field(default_factory=DefaultRotary)
    sliding_window: PositiveInt | None = None
    bias: bool = False
    output_bias: bool | None = None
    dropout: BelowOne = 0.0
    sem_dim: NonNegativeInt | None = None
    geo_dim: NonNegativeInt | None = None
    rotary_dim: PositiveInt | None = None
    num_key_heads: PositiveInt | None = None
    rope_semantic: bool = False
    tie_qk: bool = False
    gate: Literal["static", "dynamic"] | None = None
    null_slot: bool = False
    role: ClassVar[str] = "attn"
    key_rules: ClassVar[Rules] = (
        needs("sem_dim", "geo_dim", when="mode", is_="decoupled", why="where 0 stands for none"),
        only(*_DECOUPLED, when="mode", is_="decoupled"),
        excludes("dropout", when="mode", is_="decoupled"),
        excludes("rope_semantic", when="rope", is_=None),
    )

    def family(self, width: int, std: float = 0.0) -> Any:
        """The config of a model with one layer, whose attention this is."""
        shared: dict[str, Any] = {
            "hidden_dim": width,
            "num_layers": 1,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "sliding_window": self.sliding_window,
            "attention_bias": self.bias,
            "initializer_range": std,
            **({} if self.rope is None else {"rope": self.rope}),
        }
        if self.mode != "decoupled":
            return LlamaConfig(**shared)
        decoupled = {name: getattr(self, name) for name in _DECOUPLED}
        return ModelConfig.get_choice_class("dba")(**shared, **decoupled, output_bias=self.output_bias)

    def kind(self, width: int) -> LayerKind:
        """Returns what is static about a layer with this attention."""
        family = self.family(width)
        (kind,) = family.kinds
        rope = None if self.rope is None else kind.rope
        return dataclasses.replace(kind, rope=rope, rotary_size=family.RotarySize.size)

    @property
    def structure(self) -> "AttentionNode":
        """The same for all attention with the same parameters that computes the same, apart from its `LayerKind`."""
        rope = self.rope if self.rope_semantic else DefaultRotary()
        return dataclasses.replace(self, rope=rope, sliding_window=None)

    def check_keys(self, width: int, path: str) -> None:
        if self.mode == "standard" and self.num_kv_heads not in (None, self.num_heads):
            raise ConfigError(
                f"{path}.num_kv_heads: {self.num_kv_heads} given, but mode: standard has as many as query heads"
                f" ({self.num_heads}). Remove it, or set mode: gqa"
            )
        family = self.family(width)
        try:
            if self.rope is None and self.mode != "decoupled":
                check_sizes(family)
            else:
                family.check()
        except ConfigError as error:  # of a family, whose keys are those of the model
            raise ConfigError(str(error).replace("model.", f"{path}.")) from error

    def init(self, width: int, std: float, *, key: jax.Array) -> SelfAttention | DecoupledAttention:
        family = self.family(width, std)
        attention = family.attention(jax.random.split(key, 4))
        if isinstance(attention, DecoupledAttention):
            return attention
        out = attention.o_proj
        if self.output_bias not in (None, self.bias):
            out = Linear.init(out.In, out.Out, std=std, use_bias=bool(self.output_bias), key=key)
            out = dataclasses.replace(out, weight=attention.o_proj.weight)
        return dataclasses.replace(attention, o_proj=out, dropout=self.dropout)


@choice(Node, "rms_norm")
class RmsNormNode(LayerNode):
    """x / rms(x) * weight.

    Attributes:
        epsilon: added to the mean square, for numerical stability.
        weight: multiply by a weight.
    """

    epsilon: NonNegativeFloat = 1e-5
    weight: bool = True
    role: ClassVar[str] = "norm"

    def init(self, width: int, std: float, *, key: jax.Array) -> RMSNorm | UnweightedRMSNorm:
        Embed = Axis(EMBED, width)
        return RMSNorm.init(Embed, self.epsilon) if self.weight else UnweightedRMSNorm(Embed, self.epsilon)


@choice(Node, "layer_norm")
class LayerNormNode(LayerNode):
    """(x - mean) / std * weight + bias.

    Attributes:
        epsilon: added to the variance, for numerical stability.
        weight: multiply by a weight. False also leaves out the bias.
        bias: add a bias.
    """

    epsilon: NonNegativeFloat = 1e-5
    weight: bool = True
    bias: bool = True
    role: ClassVar[str] = "norm"

    def check_keys(self, width: int, path: str) -> None:
        if self.bias and not self.weight:
            raise ConfigError(f"{path}.bias: true given, but a norm without weight has no bias. Set bias: false")

    def init(self, width: int, std: float, *, key: jax.Array) -> LayerNorm | UnweightedLayerNorm:
        Embed = Axis(EMBED, width)
        if not self.weight:
            return UnweightedLayerNorm(Embed, self.epsilon)
        return LayerNorm.init(Embed, self.epsilon, use_bias=self.bias)


class Projection(eqx.Module):
    """A linear layer between numbers of features, all of which have the axis `embed` in activations.

    Attributes:
        proj: {mlp, embed}, because the axes of a matrix have different names.
    """

    proj: Linear

    def __call__(self, x: NamedArray) -> NamedArray:
        return self.proj(x).rename({MLP: EMBED})


@choice(Node, "linear")
class LinearNode(LayerNode):
    """A linear layer.

    Attributes:
        output_dim: features of the output. Null means those of the input.
        bias: add a bias.
    """

    output_dim: PositiveInt | None = None
    bias: bool = False
    role: ClassVar[str] = "linear"

    def output_width(self, width: int) -> int:
        return width if self.output_dim is None else self.output_dim

    def init(self, width: int, std: float, *, key: jax.Array) -> Projection:
        Out = Axis(MLP, self.output_width(width))
        return Projection(Linear.init(Axis(EMBED, width), Out, std=std, key=key, use_bias=self.bias))


class _MlpNode(LayerNode):
    """A layer with hidden features."""

    intermediate_dim: int
    activation_function: str = "silu"
    bias: bool
    role: ClassVar[str] = "mlp"

    def check_keys(self, width: int, path: str) -> None:
        check_choice(f"{path}.activation_function", self.activation_function, ACTIVATIONS)

    def family(self, width: int, std: float) -> LlamaConfig:
        """The config of a model whose MLP has these sizes."""
        return LlamaConfig(
            hidden_dim=width,
            intermediate_dim=self.intermediate_dim,
            activation_function=self.activation_function,
            initializer_range=std,
        )


class _GatedNode(_MlpNode):
    """down(activation(gate(x)) * up(x))."""

    def init(self, width: int, std: float, *, key: jax.Array) -> GatedMlp:
        return gated_mlp(self.family(width, std), jax.random.split(key, 3), use_bias=self.bias)


@choice(Node, "swiglu")
class SwigluNode(_GatedNode):
    """down(silu(gate(x)) * up(x)).

    Attributes:
        intermediate_dim: hidden features.
        bias: add biases to the projections.
    """

    intermediate_dim: PositiveInt = field(kw_only=True)
    bias: bool = False


@choice(Node, "glu")
class GluNode(_GatedNode):
    """down(activation(gate(x)) * up(x)).

    Attributes:
        intermediate_dim: hidden features.
        activation_function: activation of the gate.
        bias: add biases to the projections.
    """

    intermediate_dim: PositiveInt = field(kw_only=True)
    activation_function: str = "sigmoid"
    bias: bool = False


@choice(Node, "mlp")
class MlpNode(_MlpNode):
    """down(activation(up(x))).

    Attributes:
        intermediate_dim: hidden features.
        activation_function: activation of the hidden features.
        bias: add biases to the projections.
    """

    intermediate_dim: PositiveInt = field(kw_only=True)
    activation_function: str = "gelu_new"
    bias: bool = True

    def init(self, width: int, std: float, *, key: jax.Array) -> Mlp:
        return plain_mlp(self.family(width, std), jax.random.split(key, 2), use_bias=self.bias)


@choice(Node, "moe")
class MoeNode(LayerNode):
    """A dropless mixture of gated MLPs.

    Attributes:
        intermediate_dim: hidden features of each expert.
        activation_function: activation of the gates.
        num_experts: number of experts.
        num_experts_per_token: number of experts that each token is routed to.
        norm_topk_prob: normalize the probabilities of a token's experts to sum to 1.
        router_aux_loss_coef: coefficient of the load-balancing loss, computed over a microbatch on all devices.
        router_z_loss_coef: coefficient of the router z-loss, the squared logsumexp of the router logits.
    """

    intermediate_dim: PositiveInt = field(kw_only=True)
    activation_function: str = "silu"
    num_experts: PositiveInt = 8
    num_experts_per_token: PositiveInt = 2
    norm_topk_prob: bool = True
    router_aux_loss_coef: NonNegativeFloat = 0.001
    router_z_loss_coef: NonNegativeFloat = 0.0
    role: ClassVar[str] = "mlp"

    @property
    def router_keys(self) -> dict[str, Any]:
        """The keys that the router's statistics depend on, which are those of all layers together."""
        names = ("num_experts", "num_experts_per_token", "router_aux_loss_coef", "router_z_loss_coef")
        return {name: getattr(self, name) for name in names}

    def check_keys(self, width: int, path: str) -> None:
        check_choice(f"{path}.activation_function", self.activation_function, ACTIVATIONS)
        check_at_least(f"{path}.num_experts", self.num_experts, self.num_experts_per_token)

    def init(self, width: int, std: float, *, key: jax.Array) -> Experts:
        config = Qwen3MoeConfig(
            hidden_dim=width,
            intermediate_dim=self.intermediate_dim,
            activation_function=self.activation_function,
            norm_topk_prob=self.norm_topk_prob,
            initializer_range=std,
            **self.router_keys,
        )
        return experts(config, jax.random.split(key, 4))


class Dropout(eqx.Module):
    """Zeroes features in training."""

    probability: float = eqx.field(static=True)

    def __call__(self, x: NamedArray, key: jax.Array | None) -> NamedArray:
        return dropout(x, self.probability, key)


@choice(Node, "dropout")
class DropoutNode(LayerNode):
    """Zeroes features in training, and scales the others up.

    Attributes:
        probability: of a feature to be zeroed.
    """

    probability: BelowOne = field(kw_only=True)
    role: ClassVar[str] = "dropout"

    def init(self, width: int, std: float, *, key: jax.Array) -> Dropout:
        return Dropout(self.probability)
