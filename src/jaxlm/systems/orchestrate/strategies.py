"""The strategies of a portfolio: update rules that all read one state.

Every rule reads the running mean of the gradients, mu, and some the running mean of their squares, nu, each with the sum of
its weights. SGD's momentum is a sum, mu / (1 - beta1); Lion's is mu; Muon's is a sum too, whose scale changes nothing.

Source: those of the optimizers adam, lion and muon; Sutskever et al. 2013 for SGD with Nesterov momentum, as in torch; Keskar
and Socher 2017 (arXiv:1712.07628), algorithm 1, for the learning rate of `swats`.
"""

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp

from jaxlm.core.field_types import BelowOne, NonNegativeFloat, PositiveFloat
from jaxlm.core.rules import Rules, only
from jaxlm.optim.clipping import AdaGc
from jaxlm.reading.choices import choice

Number = float | jax.Array


class Moments(NamedTuple):
    """Holds what an update rule reads of one parameter, as float32 arrays.

    Attributes:
        gradient: after clipping.
        before, mu: running mean of the gradients without and with this one.
        mu_weight: sum of the weights of mu.
        nu: running mean of the squares with this gradient; None if no strategy needs it.
        nu_weight: sum of its weights.
        sgd_rate: the learning rate at which SGD would go as far as Adam, divided by Adam's; None if no strategy needs it.
    """

    gradient: jax.Array
    before: jax.Array
    mu: jax.Array
    mu_weight: jax.Array
    nu: jax.Array | None
    nu_weight: jax.Array | None
    sgd_rate: jax.Array | None


@dataclass(frozen=True)
class Strategy(draccus.ChoiceRegistry, abc.ABC):
    """A row of a portfolio: an update rule with its numbers. `type:` in YAML selects the rule.

    Attributes:
        lr_scale: the learning rate is the optimizer's times this.
        weight_decay: decoupled weight decay; null is the optimizer's `weight_decay`.
        max_grad_norm: maximum global gradient norm; larger gradients are scaled down to it. Null disables clipping.
        adagc: clip the gradient of each tensor by its own recent norms (AdaGC), before `max_grad_norm`: true, or a section,
            which all strategies that clip in this way share.
    """

    lr_scale: PositiveFloat = 1.0
    weight_decay: NonNegativeFloat | None = None
    max_grad_norm: PositiveFloat | None = None
    adagc: bool | AdaGc = False
    orthogonalizes: ClassVar[bool] = False
    """Whether the rule has directions of its own for hidden matrices: their orthogonalized momentum."""

    @property
    @abc.abstractmethod
    def mean_decay(self) -> float:
        """Decay rate of the running mean of the gradients."""

    @property
    def matrix_mean_decay(self) -> float:
        """The same for hidden matrices."""
        return self.mean_decay

    @property
    def square_decay(self) -> float | None:
        """Decay rate of the running mean of the squares; None if the rule does not need it."""
        return None

    @property
    def needs_matrix_squares(self) -> bool:
        """Tells whether the rule needs the squares of hidden matrices too."""
        return self.square_decay is not None

    @property
    def compared_epsilon(self) -> float | None:
        """Epsilon of the Adam that `Moments.sgd_rate` compares with; None if the rule does not need that."""
        return None

    @property
    def others_scale(self) -> float:
        """The learning rate of all other parameters, divided by that of hidden matrices."""
        return 1.0

    @staticmethod
    @abc.abstractmethod
    def direction(moments: Moments, numbers: "dict[str, Number]") -> jax.Array:
        """The direction of an update, before weight decay and learning rate.

        Args:
            numbers: the fields of the rule by name, scalars that may be traced; 1 is true.
        """


def adam_direction(moments: Moments, epsilon: Number) -> jax.Array:
    """Adam's direction, with bias correction."""
    assert moments.nu is not None
    assert moments.nu_weight is not None
    return moments.mu / moments.mu_weight / (jnp.sqrt(moments.nu / moments.nu_weight) + epsilon)


def _ahead(moments: Moments, decay: Number, nesterov: Number) -> jax.Array:
    """The mean, or what it would be with this gradient once more."""
    return jnp.where(nesterov > 0, decay * moments.mu + (1 - decay) * moments.gradient, moments.mu)


@choice(Strategy, "adamw")
class AdamW(Strategy):
    """Adam with decoupled weight decay.

    Attributes:
        beta1: decay rate of the first moment (running mean of the gradients).
        beta2: decay rate of the second moment (running mean of the squared gradients).
        epsilon: added to the square root of the second moment.
    """

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8

    @property
    def mean_decay(self) -> float:
        return self.beta1

    @property
    def square_decay(self) -> float:
        return self.beta2

    @staticmethod
    def direction(moments: Moments, numbers: dict[str, Number]) -> jax.Array:
        return adam_direction(moments, numbers["epsilon"])


@choice(Strategy, "sgd")
class Sgd(Strategy):
    """SGD with momentum.

    Attributes:
        beta1: decay rate of the momentum.
        nesterov: use Nesterov momentum.
        swats: the learning rate that SGD needs to go as far as Adam would, as SWATS measures it, in place of the optimizer's.
            It is measured in every step, whatever the strategy: the mean squared norm of Adam's step, divided by the mean of
            its product with the gradient. (The ratio of a single step has no bound.) The schedule and `lr_scale` scale it.
        beta2, epsilon: for `swats`, those of the Adam that SGD is compared with; `beta2` is the decay rate of both means too.
    """

    beta1: BelowOne = 0.9
    nesterov: bool = False
    swats: bool = False
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8

    key_rules: ClassVar[Rules] = (only("beta2", "epsilon", when="swats"),)

    @property
    def mean_decay(self) -> float:
        return self.beta1

    @property
    def square_decay(self) -> float | None:
        return self.beta2 if self.swats else None

    @property
    def compared_epsilon(self) -> float | None:
        return self.epsilon if self.swats else None

    @staticmethod
    def direction(moments: Moments, numbers: dict[str, Number]) -> jax.Array:
        decay = numbers["beta1"]
        # With SWATS, the step of the mean, (1 - beta1) times the sum.
        rate = 1 / (1 - decay)
        if moments.sgd_rate is not None:
            rate = jnp.where(numbers["swats"] > 0, moments.sgd_rate, rate)
        return rate * _ahead(moments, decay, numbers["nesterov"])


@choice(Strategy, "lion")
class Lion(Strategy):
    """The sign of an interpolation of momentum and gradient.

    Attributes:
        beta1: weight of the momentum in the interpolation whose sign is taken.
        beta2: decay rate of the momentum.
    """

    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.99

    @property
    def mean_decay(self) -> float:
        return self.beta2

    @staticmethod
    def direction(moments: Moments, numbers: dict[str, Number]) -> jax.Array:
        return jnp.sign(numbers["beta1"] * moments.before + (1 - numbers["beta1"]) * moments.gradient)


@choice(Strategy, "muon")
class Muon(Strategy):
    """Orthogonalizes the momentum of hidden matrices, and uses Adam for all other parameters.

    Updates of matrices are scaled by 0.2 sqrt(max(out, in)), so that a learning rate for Adam suits both.

    Attributes:
        momentum: decay rate of the momentum of matrices.
        nesterov: use Nesterov momentum for matrices.
        adam_lr_scale: `lr_scale` of all other parameters.
        beta1, beta2, epsilon: Adam's keys of the same names, for all other parameters.
    """

    orthogonalizes: ClassVar[bool] = True
    needs_matrix_squares: ClassVar[bool] = False
    momentum: BelowOne = 0.95
    nesterov: bool = True
    adam_lr_scale: PositiveFloat = 1.0
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8

    @property
    def mean_decay(self) -> float:
        return self.beta1

    @property
    def matrix_mean_decay(self) -> float:
        return self.momentum

    @property
    def square_decay(self) -> float:
        return self.beta2

    @property
    def others_scale(self) -> float:
        return self.adam_lr_scale / self.lr_scale

    @staticmethod
    def direction(moments: Moments, numbers: dict[str, Number]) -> jax.Array:
        return adam_direction(moments, numbers["epsilon"])

    @staticmethod
    def ahead(moments: Moments, numbers: dict[str, Number]) -> jax.Array:
        """The momentum of a matrix that is orthogonalized."""
        return _ahead(moments, numbers["momentum"], numbers["nesterov"])


GUIDE: dict[str, Strategy] = {
    "conservative_adamw": AdamW(lr_scale=1.0, max_grad_norm=1.0),
    "aggressive_adamw": AdamW(lr_scale=3.0, max_grad_norm=5.0),
    "spike_resistant": AdamW(lr_scale=0.3, max_grad_norm=0.5, adagc=True),
    "sgd_escape": Sgd(swats=True, nesterov=True, max_grad_norm=1.0),
}
"""The strategies of caramba's training guide, with numbers that do what it says about them."""

_CARAMBA: Any = {"beta2": 0.999, "epsilon": 1e-8}
CARAMBA: dict[str, Strategy] = {
    "conservative_adamw": AdamW(lr_scale=0.1, max_grad_norm=0.5, **_CARAMBA),
    "aggressive_adamw": AdamW(lr_scale=5.0, max_grad_norm=1.0, **_CARAMBA),
    "sgd_escape": Sgd(lr_scale=10.0, nesterov=True, weight_decay=0.0, max_grad_norm=1.0),
    "spike_resistant": AdamW(adagc=AdaGc(mode="zscore", beta=0.99), **_CARAMBA),
    "lion_conservative": Lion(max_grad_norm=0.5),
}
"""The numbers of caramba's code, where the learning rate of spike_resistant is ten times that of conservative_adamw."""
TABLES = {"guide": GUIDE, "caramba": CARAMBA}
