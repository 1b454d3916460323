"""Base config of families with a mixture of experts in place of Llama's MLP."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EXPERTS, MLP, ROUTES, SHARED_MLP
from jaxlm.core.errors import ConfigError, check_at_least, check_divides
from jaxlm.core.field_types import AtLeastOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from jaxlm.core.rules import Rules, ordered
from jaxlm.models.activations import SwigluClamp
from jaxlm.models.decoder import DecoderBlock, DecoderConfig, gated_mlp, pre_norm_block, renumbered, rms_norm
from jaxlm.models.decoders.pre_norm import (
    PreNormConfig,
    check_layer_numbers,
    check_pre_norm,
    local_kinds,
)
from jaxlm.models.experts.dispatch import GATHER
from jaxlm.models.growth import StartsAsIdentity, without_output
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext, Mixer
from jaxlm.models.moe import Experts, SharedExpert
from jaxlm.models.norms import Norm
from jaxlm.models.routing import ChosenSoftmaxRouting, RouterStats, Routing, SigmoidRouting, SoftmaxRouting
from jaxlm.models.stacks import Block, LayerKind
from jaxlm.reading.effects import field


class MoeBlock(StartsAsIdentity):
    """x + attention(norm(x)), then x + experts(norm(x)), of which one may be shared by all tokens.

    Attributes:
        residual_scale: factor of both outputs before they are added.
    """

    attn_norm: Norm
    attn: Mixer
    mlp_norm: Norm
    mlp: Experts
    shared_expert: SharedExpert | None = None
    residual_scale: float = eqx.field(static=True, default=1.0)

    def __call__(
        self, x: NamedArray, context: LayerContext, layer_cache: LayerCache | None, **_: Any
    ) -> tuple[NamedArray, ForCache, RouterStats]:
        attended, new = self.attn(self.attn_norm(x), context, layer_cache)
        x = x + self._scaled(attended)
        normed = self.mlp_norm(x)
        out, stats = self.mlp(normed, context.attention_mask.segment_ids)
        if self.shared_expert is not None:
            out = out + self.shared_expert(normed)
        return x + self._scaled(out), new, stats

    def as_identity(self) -> "MoeBlock":
        attn, _ = without_output(self.attn, "o_proj", None)
        mlp, _ = without_output(self.mlp, "down_proj", None)
        shared = self.shared_expert
        if shared is not None:
            shared = dataclasses.replace(shared, mlp=without_output(shared.mlp, "down_proj", None)[0])
        return dataclasses.replace(self, attn=attn, mlp=mlp, shared_expert=shared)

    def _scaled(self, out: NamedArray) -> NamedArray:
        return out if self.residual_scale == 1.0 else out * self.residual_scale


class ExpertsConfig(DecoderConfig):
    """A family declares as keys the values that its config.json has. Others it may set for all its models, without an
    annotation: `scores = "sigmoid"`.

    Attributes:
        shared_expert_intermediate_dim: width of the expert that all tokens share.
        dense_intermediate_dim: hidden width of the MLP of dense layers. Null if there are none.
        residual_multiplier: the outputs of attention and experts are multiplied by this number before they are added.
        norm_topk_prob: normalize the scores of a token's experts to sum to 1.
        routed_scaling_factor: the outputs of experts are multiplied by this number, apart from those of the shared one.
        num_expert_groups: experts form this many groups of equal size. 1 for none.
        num_groups_per_token: number of groups that each token chooses its experts from.
        swiglu_alpha: factor of the gate in the sigmoid of a clamped activation.
        swiglu_limit: in experts, the gate is at most this number, and what it multiplies is between it and its negative; the
            activation is (up + 1) gate sigmoid(alpha gate). Null for the usual activation.
        router_bias_step: in each update, the bias of an expert goes down by this number if more than its share of the batch's
            tokens were sent to it, and up if fewer were. A model that is read from a folder of Hugging Face has 0.
    """

    shared_expert_intermediate_dim: NonNegativeInt = 0
    shared_expert_has_gate: ClassVar[bool] = True
    dense_intermediate_dim: PositiveInt | None = None
    residual_multiplier: PositiveFloat = 1.0
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0
    num_expert_groups: PositiveInt = 1
    num_groups_per_token: PositiveInt = 1
    router_bias_step: NonNegativeFloat = 0.001
    swiglu_alpha: PositiveFloat = 1.702
    swiglu_limit: PositiveFloat | None = None
    scores: ClassVar[Literal["softmax", "sigmoid", "logits"]] = "softmax"
    """What the scores of experts are of the logits. Those of sigmoids have a correction bias and float32 products. With
    logits, shares are a softmax over the chosen ones."""
    expert_bias: ClassVar[bool] = False
    """Router and experts have biases."""


@dataclass(frozen=True)
class DispatchConfig(DecoderConfig):
    """A family that may have experts.

    Attributes:
        router_aux_loss_coef: coefficient of the load-balancing loss, computed over a microbatch on all devices.
        router_z_loss_coef: coefficient of the router z-loss, the squared logsumexp of the router logits. It keeps the
            logits small.
        expert_dispatch: how devices that share both a batch and the experts exchange tokens. `gather`: each gathers all
            tokens. `padded`, `ragged`: each sends a token to the devices that have its experts, `padded` a fixed number to
            each, `ragged` as many as there are. `auto` is `gather`, which needs no capacity to be fast and runs everywhere.
        expert_capacity: how many choices of tokens a device computes (`padded`: sends to each device), relative to even
            loads. Choices beyond it are dropped, in evaluations too, and counted as `router/dropped`. Null drops none: then
            arrays are as large as if one device had all tokens.
        expert_products: how rows are multiplied with the matrices of their experts. `mosaic`: jax's kernels for NVIDIA's
            Hopper. `ragged_dot`: XLA's, on TPUs and, slowly, on CPUs. `blocks`: a loop over blocks of rows. `auto` selects
            the fastest that the device and the experts allow, and compares `mosaic` with single products first; the plan
            shows which one and why.
        expert_parts: each device's tokens are sent and computed in this many parts (or a divisor of both), so that one part
            travels while experts compute another. A capacity is that of each part.
    """

    router_aux_loss_coef: NonNegativeFloat = 0.001
    router_z_loss_coef: NonNegativeFloat = 0.0
    expert_dispatch: Literal["auto", "gather", "padded", "ragged"] = field("auto", on_resume="rounding")
    expert_capacity: AtLeastOne | None = None
    expert_products: Literal["auto", "mosaic", "ragged_dot", "blocks"] = field("auto", on_resume="rounding")
    expert_parts: PositiveInt = field(1, on_resume="rounding")

    def balance(self) -> dict[str, Any]:
        """The coefficients of the router's losses, as arguments of `Routing`."""
        return {"balance_weight": self.router_aux_loss_coef, "z_weight": self.router_z_loss_coef}

    def dispatched(self) -> dict[str, Any]:
        """How experts are computed, as arguments of `Experts`."""
        return {
            "expert_dispatch": GATHER if self.expert_dispatch == "auto" else self.expert_dispatch,
            "expert_capacity": self.expert_capacity,
            "expert_products": self.expert_products,
            "expert_parts": self.expert_parts,
        }


@dataclass(frozen=True)
class RoutedConfig(DispatchConfig, ExpertsConfig):
    """A family with a mixture of experts. Each expert is `intermediate_dim` wide.

    Attributes:
        num_experts: number of experts per layer.
        num_experts_per_token: number of experts that each token is routed to.
    """

    num_experts: PositiveInt = 8
    num_experts_per_token: PositiveInt = 2
    key_rules: ClassVar[Rules] = (ordered("num_experts_per_token", "num_experts"),)

    def routing(self) -> Routing:
        """Initializes what chooses the experts of a layer. A correction bias begins at 0."""
        options: dict[str, Any] = {
            "num_chosen": self.num_experts_per_token,
            "normalised": self.norm_topk_prob,
            **self.balance(),
        }
        if self.scores == "logits":
            return ChosenSoftmaxRouting(**options)
        options |= {"num_groups": self.num_expert_groups, "groups_chosen": self.num_groups_per_token}
        options |= {"scale": self.routed_scaling_factor}
        if self.scores == "softmax":
            return SoftmaxRouting(**options)
        bias = hax.zeros(Axis(ROUTES, self.num_experts))
        return SigmoidRouting(correction_bias=bias, bias_step=self.router_bias_step, **options)


class MoeConfig(RoutedConfig, PreNormConfig):
    """A pre-norm family with a mixture of experts in place of the MLP."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        everywhere = LayerKind(self.rope, self.sliding_window)
        local = range(self.num_layers) if self.local_layers is None else self.local_layers
        return local_kinds(everywhere, LayerKind(self.rope), local, self.num_layers)

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        if self.local_layers is None:
            return {}
        return {"local_layers": list(renumbered(self.local_layers, kept))}

    def block(self, *, key: jax.Array) -> MoeBlock:
        keys = jax.random.split(key, 8)
        chosen = experts(self, keys[4:])
        has_shared = self.shared_expert_intermediate_dim > 0
        shared = (
            shared_expert(self, jax.random.fold_in(key, 1), gate=self.shared_expert_has_gate) if has_shared else None
        )
        attn, scale = self.attention(keys[:4]), self.residual_multiplier
        return MoeBlock(rms_norm(self), attn, rms_norm(self), chosen, shared, residual_scale=scale)


def shared_expert(config: RoutedConfig, key: jax.Array, *, gate: bool) -> SharedExpert:
    """Initializes the expert that all tokens share. Args: gate: whether it has one."""
    keys = jax.random.split(key, 4)
    vector = hax.random.normal(keys[3], config.Embed) * config.initializer_range if gate else None
    Features = Axis(SHARED_MLP, config.shared_expert_intermediate_dim)
    return SharedExpert(gated_mlp(config, keys[:3], Features=Features), vector)


def experts(config: RoutedConfig, keys: jax.Array) -> Experts:
    """Initializes the router and the experts of a layer. Takes four keys."""
    std, Embed, Mlp, Expert = config.initializer_range, config.Embed, config.Mlp, Axis(EXPERTS, config.num_experts)
    bias = {"use_bias": config.expert_bias}
    router = Linear.init(Embed, Axis(ROUTES, config.num_experts), std=std, key=keys[0], **bias)
    limit = config.swiglu_limit
    return Experts(
        router=dataclasses.replace(router, float32=config.scores == "sigmoid"),
        gate_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[1], **bias),
        up_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[2], **bias),
        down_proj=ExpertLinear.init(Expert, Mlp, Embed, std=std, key=keys[3], **bias),
        routing=config.routing(),
        activation=config.activation_function,
        clamp=None if limit is None else SwigluClamp(config.swiglu_alpha, limit),
        **config.dispatched(),
    )


def check_moe(config: MoeConfig) -> None:
    """Raises `ConfigError` if the keys of `MoeConfig` are invalid."""
    check_pre_norm(config)
    check_layer_numbers("model.local_layers", config.local_layers or (), config.num_layers)


class UniformMoeConfig(MoeConfig):
    """A family all of whose layers have experts."""

    def check(self) -> None:
        check_moe(self)


@dataclass(frozen=True)
class MixedMoeConfig(MoeConfig):
    """A family in which some layers may have one MLP instead of experts.

    Attributes:
        decoder_sparse_step: layers are grouped by this number; the last of each group has experts, the others are dense: they
            have one MLP. 1 gives all layers experts.
        mlp_only_layers: numbers of additional dense layers, counted from 0.
    """

    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[NonNegativeInt] = field(default_factory=list)
    dense_intermediate_dim: PositiveInt | None = None

    @property
    def dense_layers(self) -> tuple[int, ...]:
        step = self.decoder_sparse_step
        return tuple(layer for layer in range(self.num_layers) if layer in self.mlp_only_layers or (layer + 1) % step)

    def layer_block(self, layer: int) -> Callable[..., Block]:
        return self._dense_block if layer in self.dense_layers else self.block

    def _dense_block(self, *, key: jax.Array) -> DecoderBlock:
        keys = jax.random.split(key, 7)
        assert self.dense_intermediate_dim is not None
        mlp = gated_mlp(self, keys[4:], Features=Axis(MLP, self.dense_intermediate_dim))
        return pre_norm_block(self, self.attention(keys[:4]), mlp)

    def layer_keys(self, kept: Sequence[int]) -> dict[str, Any]:
        dense = renumbered(self.dense_layers, kept)
        keys = {
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(dense),
            "dense_intermediate_dim": self.dense_intermediate_dim if dense else None,
        }
        return super().layer_keys(kept) | keys

    def check(self) -> None:
        check_moe(self)
        check_layer_numbers("model.mlp_only_layers", self.mlp_only_layers, self.num_layers)
        width, num_dense = self.dense_intermediate_dim, len(self.dense_layers)
        if (width is None) != (num_dense == 0):
            raise ConfigError(
                f"model.dense_intermediate_dim: {'null' if width is None else width} given, but {num_dense or 'no'} layers"
                f" have one MLP (decoder_sparse_step, mlp_only_layers). {'Set it' if num_dense else 'Remove it'}"
            )


@dataclass(frozen=True)
class GroupedMoeConfig(MixedMoeConfig):
    """A family whose experts form groups, with an expert that all tokens share.

    Attributes:
        router_aux_loss_coef: coefficient of the load-balancing loss.
    """

    shared_expert_intermediate_dim: PositiveInt = 1408
    shared_expert_has_gate: ClassVar[bool] = False
    router_aux_loss_coef: NonNegativeFloat = 0.0
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0
    num_expert_groups: PositiveInt = 1
    num_groups_per_token: PositiveInt = 1
    key_rules: ClassVar[Rules] = (ordered("num_groups_per_token", "num_expert_groups"),)

    def check(self) -> None:
        super().check()
        check_divides("model.num_expert_groups", self.num_expert_groups, "model.num_experts", self.num_experts)
        size = self.num_experts // self.num_expert_groups
        check_at_least("model.num_groups_per_token", self.num_groups_per_token, -(-self.num_experts_per_token // size))
        if self.num_expert_groups > 1:
            check_at_least("model.num_experts", self.num_experts, 2 * self.num_expert_groups)


@dataclass(frozen=True)
class BalancedMoeConfig(GroupedMoeConfig):
    """The same with routers that have a correction bias (DeepSeek-V3, GLM-4.5).

    Attributes:
        router_aux_loss_coef: coefficient of the load-balancing loss; the bias balances the experts without it.
    """

    mlp_only_layers: list[NonNegativeInt] = field(default_factory=lambda: [0])
    scores = "sigmoid"
    router_bias_step: NonNegativeFloat = 0.001
