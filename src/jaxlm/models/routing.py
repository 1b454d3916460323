"""Routing: how a mixture of experts chooses the experts of each token, and how much each of them counts.

Choices, shares and statistics are float32, whatever the dtype of the activations. Routing reads the logits of a linear layer,
`Experts.router`, which is a layer of its own for adapters and checkpoints. If several experts have the same score,
the first ones are chosen.

Source: softmax: Shazeer et al. 2017 (arXiv:1701.06538), with the softmax before the choice as in Mixtral (Jiang et al. 2024,
arXiv:2401.04088, section 2.1). Load-balancing loss: Switch Transformer, Fedus et al. 2021 (arXiv:2101.03961), equations 4
to 6, over all layers jointly. Router z-loss: ST-MoE, Zoph et al. 2022 (arXiv:2202.08906), equation 5. Sigmoid with a
correction bias and groups: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2, equations 12 to 16; its update: Wang et al. 2024
(arXiv:2408.15664), algorithm 1.

Shapes: B batch, S position, K experts per token, E experts, G groups, L layers.
"""

import abc

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from jaxlm.core.axes import BATCH, CHOICES, LAYERS, POSITION, ROUTES
from jaxlm.core.parameters import VECTOR, DeclaresParameters, Parameter, SignUpdate
from jaxlm.core.tracing import CustomVjp
from jaxlm.core.values.sums import Sum
from jaxlm.models.base import AuxLoss
from jaxlm.models.remat import CHOSEN, checkpoint_name


class RouterStats(eqx.Module):
    """Statistics of a router, summed over tokens that are not padding. float32, with a leading {layers} once stacked.

    Attributes:
        chosen: {routes}, number of times that each expert was chosen.
        probabilities: {routes}, sum of the router probabilities.
        squares: {}, sum of the squared logsumexp of the router logits.
        tokens: {}, number of tokens.
        balance_weight, z_weight: coefficients of the load-balancing loss and the z-loss.
        num_chosen: experts per token.
        dropped: {}, number of choices that were beyond the capacity of devices; None without one.
    """

    chosen: NamedArray
    probabilities: NamedArray
    squares: NamedArray
    tokens: NamedArray
    balance_weight: float = eqx.field(static=True)
    z_weight: float = eqx.field(static=True)
    num_chosen: int = eqx.field(static=True)
    dropped: NamedArray | None = None

    def aux_losses(self) -> dict[str, AuxLoss]:
        """The load-balancing loss (at best `num_chosen`) and the z-loss of all layers, the largest load of an expert
        relative to a uniform load and, with a capacity, the share of the choices that were dropped."""
        num_experts, num_layers = self.chosen.axis_size(ROUTES), self.chosen.axis_size(LAYERS)
        weight = self.tokens.array[0]
        num_tokens = jnp.maximum(weight, 1.0)
        chosen_LE = self.chosen.rearrange((LAYERS, ROUTES)).array / num_tokens
        probabilities_LE = self.probabilities.rearrange((LAYERS, ROUTES)).array / num_tokens
        balance = num_experts * jnp.sum(chosen_LE.mean(axis=0) * probabilities_LE.mean(axis=0))
        max_load = jax.lax.stop_gradient(jnp.max(chosen_LE)) * num_experts / self.num_chosen
        dropped = {}
        if self.dropped is not None:
            share = jnp.sum(jax.lax.stop_gradient(self.dropped.array)) / (num_layers * self.num_chosen)
            dropped = {"router/dropped": AuxLoss(Sum(share, weight), 0.0)}
        return dropped | {
            "router/balance_loss": AuxLoss(Sum(balance * weight, weight), self.balance_weight),
            "router/z_loss": AuxLoss(Sum(jnp.sum(self.squares.array) / num_layers, weight), self.z_weight),
            "router/max_load": AuxLoss(Sum(max_load * weight, weight), 0.0),
        }


class Routes(eqx.Module):
    """The experts of each token.

    Attributes:
        ids: {batch, position, choices}, numbers of experts.
        shares: float32 with the same axes, the factors of their outputs.
    """

    ids: NamedArray
    shares: NamedArray
    stats: RouterStats


class Routing(eqx.Module):
    """Chooses experts.

    Attributes:
        num_chosen: experts per token.
        normalised: normalize the scores of the chosen experts to sum to 1.
        balance_weight, z_weight: coefficients of the load-balancing loss and the z-loss.
    """

    num_chosen: int = eqx.field(static=True)
    normalised: bool = eqx.field(static=True)
    balance_weight: float = eqx.field(static=True)
    z_weight: float = eqx.field(static=True)

    @abc.abstractmethod
    def __call__(self, logits: NamedArray, segment_ids: NamedArray) -> Routes:
        """Maps logits {batch, position, routes} to routes.

        Args:
            segment_ids: of the tokens, {batch, position}; 0 is padding, which the statistics ignore.
        """

    def statistics(
        self, logits: NamedArray, probabilities: NamedArray, ids_BSK: jax.Array, segment_ids: NamedArray
    ) -> RouterStats:
        """Sums over the tokens. Args: probabilities: with the axes of the logits; their sum over the experts is 1."""
        Route = logits.resolve_axis(ROUTES)
        segment_ids = segment_ids.rearrange((BATCH, POSITION))
        is_token = NamedArray((segment_ids.array != 0).astype(jnp.float32), segment_ids.axes)
        hits_BSE = jnp.sum(ids_BSK[..., None] == jnp.arange(Route.size), axis=2)
        tokens = (BATCH, POSITION)
        return RouterStats(
            chosen=hax.sum(hax.named(hits_BSE, (*is_token.axes, Route)) * is_token, tokens),
            probabilities=hax.sum(probabilities * is_token, tokens),
            squares=hax.sum(hax.nn.logsumexp(logits, Route) ** 2 * is_token, tokens),
            tokens=hax.sum(is_token, tokens),
            balance_weight=self.balance_weight,
            z_weight=self.z_weight,
            num_chosen=self.num_chosen,
        )


class SoftmaxRouting(Routing, DeclaresParameters):
    """The experts of the largest probabilities; a share is the probability.

    Attributes:
        expert_scale: {routes}, factors of the shares, which need not sum to 1 then (Gemma 4); None for none.
        num_groups, groups_chosen, scale: as of `SigmoidRouting` (Mistral 4).
    """

    expert_scale: NamedArray | None = None
    num_groups: int = eqx.field(static=True, default=1)
    groups_chosen: int = eqx.field(static=True, default=1)
    scale: float = eqx.field(static=True, default=1.0)

    def __call__(self, logits: NamedArray, segment_ids: NamedArray) -> Routes:
        logits = logits.astype(jnp.float32)
        probabilities = hax.nn.softmax(logits, axis=logits.resolve_axis(ROUTES))
        chooses_BSE = _within_groups(_ordered(probabilities).array, self.num_groups, self.groups_chosen, others=0.0)
        share_BSK, ids_BSK = jax.lax.top_k(chooses_BSE, self.num_chosen)
        if self.normalised:
            share_BSK = share_BSK / jnp.sum(share_BSK, axis=-1, keepdims=True)
        if self.scale != 1.0:
            share_BSK = share_BSK * self.scale
        if self.expert_scale is not None:
            share_BSK = share_BSK * self.expert_scale.array.astype(jnp.float32)[ids_BSK]
        return _routes(share_BSK, ids_BSK, self.statistics(logits, probabilities, ids_BSK, segment_ids), segment_ids)

    def parameters(self) -> dict[str, Parameter]:
        return {"expert_scale": VECTOR}


class ChosenSoftmaxRouting(Routing):
    """The experts of the largest logits; the shares are a softmax over them, whatever `normalised` is (gpt-oss: OpenAI 2025,
    arXiv:2508.10925, section 2.3)."""

    def __call__(self, logits: NamedArray, segment_ids: NamedArray) -> Routes:
        logits = logits.astype(jnp.float32)
        chosen_BSK, ids_BSK = jax.lax.top_k(_ordered(logits).array, self.num_chosen)
        probabilities = hax.nn.softmax(logits, axis=logits.resolve_axis(ROUTES))
        stats = self.statistics(logits, probabilities, ids_BSK, segment_ids)
        return _routes(jax.nn.softmax(chosen_BSK, axis=-1), ids_BSK, stats, segment_ids)


_SMALLEST_SUM = 1e-20


class SigmoidRouting(Routing, DeclaresParameters):
    """The experts of the largest scores plus bias; a share is the score, without the bias.

    The bias keeps the loads of the experts equal without a loss. Its gradient is defined as the number of tokens that were
    sent to the expert minus the mean of all experts, times the number of experts: sums of integers below 2^24 are the same
    however a batch is divided into microbatches and among devices.

    Attributes:
        correction_bias: {routes}, float32.
        num_groups, groups_chosen: experts form this many groups, and a token chooses among the experts of the best ones, by
            the sum of the two best of each.
        scale: the shares are multiplied by this number at the end.
        bias_step: how far the bias moves in each update; with 0 its gradient is 0 too.
    """

    correction_bias: NamedArray
    num_groups: int = eqx.field(static=True)
    groups_chosen: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    bias_step: float = eqx.field(static=True)

    def __call__(self, logits: NamedArray, segment_ids: NamedArray) -> Routes:
        logits = logits.astype(jnp.float32)
        scores = hax.nn.sigmoid(logits)
        scores_BSE, bias_E = _ordered(scores).array, self.correction_bias.array
        chooses_BSE = jax.lax.stop_gradient(scores_BSE + bias_E.astype(jnp.float32))
        # A bias may be negative.
        chooses_BSE = _within_groups(chooses_BSE, self.num_groups, self.groups_chosen, others=-jnp.inf)
        _, ids_BSK = jax.lax.top_k(chooses_BSE, self.num_chosen)
        share_BSK = jnp.take_along_axis(scores_BSE, ids_BSK, axis=-1)
        if self.normalised:
            share_BSK = share_BSK / (jnp.sum(share_BSK, axis=-1, keepdims=True) + _SMALLEST_SUM)
        share_BSK = share_BSK * self.scale
        probabilities = scores / (hax.sum(scores, ROUTES) + _SMALLEST_SUM)
        stats = self.statistics(logits, probabilities, ids_BSK, segment_ids)
        if self.bias_step:
            share_BSK = _with_load(share_BSK, bias_E, stats.chosen.array)
        return _routes(share_BSK, ids_BSK, stats, segment_ids)

    def parameters(self) -> dict[str, Parameter]:
        return {"correction_bias": Parameter(float32=True, rule=SignUpdate(self.bias_step))}


def _within_groups(chooses_BSE: jax.Array, num_groups: int, groups_chosen: int, *, others: float) -> jax.Array:
    """The scores by which experts are chosen, with `others` for those that are not in the best groups."""
    if num_groups == 1:
        return chooses_BSE
    *tokens, num_experts = chooses_BSE.shape
    by_group = chooses_BSE.reshape(*tokens, num_groups, num_experts // num_groups)
    value_BSG = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
    _, best = jax.lax.top_k(value_BSG, groups_chosen)
    is_best_BSG = jnp.any(best[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(is_best_BSG[..., None], by_group, others).reshape(chooses_BSE.shape)


@CustomVjp
def _with_load(share_BSK: jax.Array, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
    """The shares, and the load of each expert as the gradient of its bias."""
    del bias_E, load_E
    return share_BSK


def _with_load_forward(share_BSK, bias_E, load_E):
    return _with_load(share_BSK, bias_E, load_E), (load_E, jnp.zeros((), bias_E.dtype))


def _with_load_backward(residuals, d_share_BSK):
    load_E, zero = residuals
    excess_E = load_E * load_E.size - jnp.sum(load_E)
    return d_share_BSK, excess_E.astype(zero.dtype), None


_with_load.defvjp(_with_load_forward, _with_load_backward)


def _ordered(by_expert: NamedArray) -> NamedArray:
    return by_expert.rearrange((BATCH, POSITION, ROUTES))


def _routes(share_BSK: jax.Array, ids_BSK: jax.Array, stats: RouterStats, segment_ids: NamedArray) -> Routes:
    axes = (segment_ids.resolve_axis(BATCH), segment_ids.resolve_axis(POSITION), Axis(CHOICES, ids_BSK.shape[-1]))
    return Routes(checkpoint_name(NamedArray(ids_BSK, axes), CHOSEN), NamedArray(share_BSK, axes), stats)
