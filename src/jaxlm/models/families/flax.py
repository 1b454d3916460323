"""A module of Flax in the `model` section: `type: flax`."""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import jax
from haliax import Axis, NamedArray

from jaxlm.core.errors import ConfigError, check_at_least
from jaxlm.models.base import ModelConfig, vocab_axis
from jaxlm.models.flax.model import FlaxDefinition, FlaxModel, load_factory, named_axes
from jaxlm.models.flax.modules import FlaxInputs
from jaxlm.models.flops import FlopsPerToken, matrix_operations
from jaxlm.models.remat import AUTO, parse_remat

_DECODES_IN_FULL = "the module keeps no cache: sampling makes a whole forward pass for every token"
_SEES_ALL = "the module takes no `segment_ids`: in a window, a document sees those before it"


@ModelConfig.register_subclass("flax")
@dataclass(frozen=True)
class FlaxConfig(ModelConfig):
    """A Flax module, NNX or Linen, from tokens [batch, position] to logits [batch, position, vocab]. It must be causal.

    The factory is called with `kwargs`, and with `vocab_size`, `seq_len` and `rngs` (an `nnx.Rngs`) as far as it takes
    them. The module's call is given the tokens, and by name what it takes of `positions`, `segment_ids`, `train`,
    `deterministic` and `rngs`.

    Attributes:
        factory: the function that makes the module, as `package.module:function`.
        kwargs: arguments of the factory.
        axes: regular expression on a parameter's path (`blocks.0.mlp.kernel`) to the names of its axes, null for one
            without a name; the first that is found decides, and goes over the module's own partitioning metadata.
    """

    factory: str = field(kw_only=True)
    kwargs: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[str | None]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises `ConfigError` for keys that mean nothing to a module of others, and where there is no factory."""
        check_at_least("model.seq_len", self.seq_len, 1)
        for name in ("scan_layers", "attn_backend"):
            if getattr(self, name) != AUTO:
                raise ConfigError(
                    f"model.{name}: {getattr(self, name)} given, which a Flax module decides itself. Leave it out"
                )
        if isinstance(self.gradient_checkpointing, tuple):
            raise ConfigError(
                "model.gradient_checkpointing: a list of names given, which a Flax module does not have. Allowed: auto,"
                " none, cheap, full"
            )
        load_factory(self.factory)

    def build(self, Vocab: Axis, *, key: jax.Array) -> "FlaxModel":
        """A freshly initialised model.

        Raises:
            ConfigError: the factory or the module fails, or its logits or axes are not what is expected.
        """
        definition = FlaxDefinition(self.factory, json.dumps(self.kwargs, sort_keys=True), Vocab.size, self.seq_len)
        module = definition.module
        params = module.init(key)
        axes = named_axes({path: array.shape for path, array in params.items()}, module.names, self.axes)
        return FlaxModel(
            {path: NamedArray(array, axes[path]) for path, array in params.items()},
            definition,
            parse_remat(self.gradient_checkpointing),
            notes=(_DECODES_IN_FULL,) if "segment_ids" in module.takes else (_DECODES_IN_FULL, _SEES_ALL),
        )

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Three times what the matrix products of the forward pass do; attention counts as the module computes it."""
        model = jax.eval_shape(lambda: self.build(vocab_axis(vocab_size), key=jax.random.key(0)))
        arrays = {path: leaf.array for path, leaf in model.params.items()}
        traced = jax.make_jaxpr(functools.partial(model.definition.module.logits, key=None))
        operations = 3 * matrix_operations(traced(arrays, FlaxInputs.blank(1, self.seq_len)).jaxpr) / self.seq_len
        return FlopsPerToken(operations, operations)
