"""What families share that have experts in the place of Llama's feed-forward network."""

import abc
from dataclasses import dataclass

import equinox as eqx
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EXPERTS, ROUTES
from jaxlm.core.errors import check_at_least
from jaxlm.models.decoder import active_flops, rms_norm
from jaxlm.models.families.pre_norm import PreNormConfig, check_pre_norm
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.layers import ForCache, LayerCache, LayerContext, SelfAttention
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.models.moe import Experts, RouterStats
from jaxlm.models.norms import RMSNorm
from jaxlm.models.stacks import LayerKind


class MoeBlock(eqx.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    attn_norm: RMSNorm
    attn: SelfAttention
    mlp_norm: RMSNorm
    mlp: Experts

    def __call__(
        self, x: NamedArray, context: LayerContext, past: LayerCache | None, *, index: NamedArray, key: jax.Array | None
    ) -> tuple[NamedArray, ForCache, RouterStats]:
        """{batch, position, embed} to the same, the layer's keys and values, and what its router did."""
        del index, key
        attended, new = self.attn(self.attn_norm(x), context, past)
        x = x + attended
        out, seen = self.mlp(self.mlp_norm(x), context.attention_mask.segment_ids)
        return x + out, new, seen


@dataclass(frozen=True)
class MoeConfig(PreNormConfig):
    """A family whose layers all have experts, `intermediate_dim` wide each.

    Attributes:
        num_experts: of each layer.
        num_experts_per_token: how many of them a token goes through.
        router_aux_loss_coef: of the loss that evens the experts' load, over a micro-batch on all devices.
        router_z_loss_coef: of the squared logarithm of the router's softmax denominator, which keeps its logits small.
    """

    num_experts: int = 8
    num_experts_per_token: int = 2
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0

    @property
    @abc.abstractmethod
    def normalises(self) -> bool:
        """Whether the probabilities of a token's experts are made to sum to 1."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is, first to last: all the same."""
        return (LayerKind(self.rope, self.sliding_window),) * self.num_layers

    def check(self) -> None:
        """Raises `ConfigError` where the numbers cannot make a model."""
        check_pre_norm(self)
        check_at_least("model.num_experts_per_token", self.num_experts_per_token, 1)
        check_at_least("model.num_experts", self.num_experts, self.num_experts_per_token)
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            check_at_least(f"model.{name}", getattr(self, name), 0)

    def block(self, *, key: jax.Array) -> MoeBlock:
        """One freshly initialised block."""
        keys = jax.random.split(key, 8)
        std, Embed, Mlp, Expert = self.initializer_range, self.Embed, self.Mlp, Axis(EXPERTS, self.num_experts)
        experts = Experts(
            router=Linear.init(Embed, Axis(ROUTES, self.num_experts), std=std, key=keys[4]),
            gate_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[5]),
            up_proj=ExpertLinear.init(Expert, Embed, Mlp, std=std, key=keys[6]),
            down_proj=ExpertLinear.init(Expert, Mlp, Embed, std=std, key=keys[7]),
            activation=self.activation_function,
            num_chosen=self.num_experts_per_token,
            normalised=self.normalises,
            balance_weight=self.router_aux_loss_coef,
            z_weight=self.router_z_loss_coef,
        )
        return MoeBlock(rms_norm(self), self.attention(keys[:4]), rms_norm(self), experts)

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Floating-point operations of one training token, in the experts that it goes through alone."""
        chosen = 3 * self.num_experts_per_token * self.hidden_dim * self.intermediate_dim
        return active_flops(self, vocab_size, mlp_weights=chosen + self.hidden_dim * self.num_experts)
