"""Flax modules in the `model` section: `type: flax`."""

import functools
import json
from dataclasses import field
from typing import Any, ClassVar

import jax
from haliax import Axis, NamedArray

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.rules import Rules, unused
from jaxlm.models.base import ModelConfig, ModelTraits, vocab_axis
from jaxlm.models.flax.model import FlaxDefinition, FlaxInputs, FlaxModel, load_factory, named_axes
from jaxlm.models.flops import FlopsPerToken, matrix_operations
from jaxlm.models.remat import AUTO, CHEAP, FULL, NONE, parse_remat, remat_name
from jaxlm.reading.choices import choice

_NO_CACHE = "the module has no KV cache: generation runs a full forward pass for every token"
_NO_SEGMENT_IDS = "the module takes no `segment_ids`: a packed document attends to the documents before it"


@choice(ModelConfig, "flax")
class FlaxConfig(ModelConfig):
    """A causal Flax module (NNX or Linen) from tokens [batch, position] to logits [batch, position, vocab].

    The factory is called with `kwargs`, plus those of `vocab_size`, `seq_len` and `rngs` (an `nnx.Rngs`) that it
    accepts. The module is called with the tokens, plus those of the keyword arguments `positions`, `segment_ids`,
    `train`, `deterministic` and `rngs` that it accepts.

    Attributes:
        factory: function that builds the module, as `package.module:function`.
        kwargs: keyword arguments passed to the factory.
        axes: maps a regular expression to axis names. A parameter whose path (`blocks.0.mlp.kernel`) matches gets these
            names for its dimensions; null leaves a dimension unnamed. The first match wins and overrides the module's
            own partitioning metadata.
    """

    factory: str = field(kw_only=True)
    kwargs: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[str | None]] = field(default_factory=dict)
    key_rules: ClassVar[Rules] = (
        unused(
            *("scan_layers", "attn_backend", "mlp_tile_tokens", "pad_vocab_to_multiple_of"),
            why="a Flax module computes its layers itself",
        ),
    )

    def check(self) -> None:
        check_fields(self, "model")
        if (policy := parse_remat(self.gradient_checkpointing)) not in (AUTO, NONE, CHEAP, FULL):
            raise ConfigError(
                f"model.gradient_checkpointing: {remat_name(policy)} given, but jaxlm does not know the activations and"
                " layers of a Flax module. Allowed: auto, none, cheap, full"
            )
        load_factory(self.factory)

    def build(self, Vocab: Axis, *, key: jax.Array) -> "FlaxModel":
        """Initializes a model.

        Raises:
            ConfigError: the factory or the module fails, the logits have the wrong shape or dtype, or `axes` does not
                fit.
        """
        definition = FlaxDefinition(self.factory, json.dumps(self.kwargs, sort_keys=True), Vocab.size, self.seq_len)
        module = definition.module
        params = module.init(key)
        axes = named_axes({path: array.shape for path, array in params.items()}, module.names, self.axes)
        return FlaxModel(
            {path: NamedArray(array, axes[path]) for path, array in params.items()},
            definition,
            parse_remat(self.gradient_checkpointing),
            traits=ModelTraits(notes=(_NO_CACHE,) if "segment_ids" in module.takes else (_NO_CACHE, _NO_SEGMENT_IDS)),
        )

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        """Three times the matrix-product FLOPs of the forward pass. Attention is counted as the module computes it."""
        model = jax.eval_shape(lambda: self.build(vocab_axis(vocab_size), key=jax.random.key(0)))
        arrays = {path: leaf.array for path, leaf in model.params.items()}
        traced = jax.make_jaxpr(functools.partial(model.definition.module.logits, key=None))
        operations = 3 * matrix_operations(traced(arrays, FlaxInputs.blank(1, self.seq_len)).jaxpr) / self.seq_len
        return FlopsPerToken(operations, operations)
