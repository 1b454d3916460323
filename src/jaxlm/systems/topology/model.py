"""A language model whose layers are written in the YAML (`type: topology`), as a tree of layers."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, NoReturn

import equinox as eqx
import jax
from haliax import Axis, NamedArray

from jaxlm.core.axes import EMBED, LAYERS
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeFloat, PositiveInt, check_fields
from jaxlm.core.sharding import for_lookup
from jaxlm.interop.hf.families.mixtral import MixtralConfig
from jaxlm.models.base import Inputs, ModelConfig, as_family
from jaxlm.models.decoder import DecoderConfig, TransformerModel, decoder_flops, initial_body, transformer_traits
from jaxlm.models.flops import FlopsPerToken
from jaxlm.models.layers import Embedding, token_embeddings
from jaxlm.models.linear import Linear
from jaxlm.models.stacks import Body, LayerKind
from jaxlm.reading.choices import choice
from jaxlm.systems.topology.layers import (
    AttentionNode,
    GluNode,
    MoeNode,
    NestedNode,
    Node,
    RmsNormNode,
    StackedNode,
    SwigluNode,
)
from jaxlm.systems.topology.structure import PATH, TopologyLayer, check_groups, final_norm, layers_of


@choice(ModelConfig, "topology")
class TopologyConfig(ModelConfig):
    """A decoder whose layers are written out: groups (`stacked`, `nested`, `residual`) of layers (`attention`, `rms_norm`,
    `layer_norm`, `linear`, `swiglu`, `glu`, `mlp`, `moe`, `dropout`).

    Attributes:
        hidden_dim: width of the residual stream.
        topology: the layers between the token embedding and the head. A norm at its end is the norm before the head.
        initializer_range: standard deviation of the normal initialization of every weight matrix.
        tie_word_embeddings: use the token embedding as the output head.
    """

    hidden_dim: PositiveInt = 512
    topology: Node = field(kw_only=True)
    initializer_range: NonNegativeFloat = 0.02
    tie_word_embeddings: bool = False

    @property
    def Embed(self) -> Axis:
        return Axis(EMBED, self.hidden_dim)

    @property
    def Layers(self) -> Axis:
        return Axis(LAYERS, len(self.layers))

    @property
    def layers(self) -> tuple[TopologyLayer, ...]:
        """The layers of the body, of which each has one attention."""
        return layers_of(self.topology, self.hidden_dim)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, from first to last."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def stack_of_layer(self) -> tuple[int, ...]:
        """The number of the stack that each layer is in: layers with the same parts are in one stack."""
        structures = [layer.structure for layer in self.layers]
        numbers = {structure: number for number, structure in enumerate(dict.fromkeys(structures))}
        return tuple(numbers[structure] for structure in structures)

    def check(self) -> None:
        check_fields(self, "model")
        check_groups(self.topology)
        for layer in dict.fromkeys(self.layers):
            layer.check()
        self._check_experts()
        if (norm := final_norm(self.topology)) is not None:
            norm.check(self.hidden_dim)

    def _check_experts(self) -> None:
        """All experts share one load-balancing loss."""
        items = [part for layer in self.layers for item in layer.items for part in item.all_of(MoeNode)]
        for item in items[1:]:
            first, other = items[0].node, item.node
            assert isinstance(first, MoeNode)
            assert isinstance(other, MoeNode)
            for name, value in other.router_keys.items():
                if value != (expected := first.router_keys[name]):
                    raise ConfigError(
                        f"{item.path}.{name}: {value} given, but {items[0].path} has {expected}. All moe layers of a topology"
                        f" share one load-balancing loss: give them the same {name}"
                    )

    def build(self, Vocab: Axis, *, key: jax.Array) -> "TopologyModel":
        k_tokens, k_layers, k_head = jax.random.split(key, 3)
        std = self.initializer_range
        head = None if self.tie_word_embeddings else Linear.init(self.Embed, Vocab, std=std, key=k_head)
        tokens = Embedding.init(Vocab, self.Embed, std=std, key=k_tokens)
        item = final_norm(self.topology)
        norm: Any = eqx.nn.Identity() if item is None else item.init(self.hidden_dim, 0.0, key=k_layers)
        body = initial_body(self, self._block, self.kinds, norm, key=k_layers)
        traits = dataclasses.replace(transformer_traits(self), reads_beyond=True)
        return TopologyModel(tokens, body, head, self, traits=traits)

    def with_layers(self, kept: Sequence[int]) -> "TopologyConfig":
        layers = [self.layers[number] for number in kept]
        groups: list[Node] = [
            NestedNode(layers=list(nodes), repeat=len(list(same)))
            for nodes, same in itertools.groupby(layer.nodes for layer in layers)
        ]
        norm = final_norm(self.topology)
        return dataclasses.replace(self, topology=StackedNode(layers=groups if norm is None else [*groups, norm.node]))

    def flops_per_token(self, vocab_size: int) -> FlopsPerToken:
        return decoder_flops(self, self._block, vocab_size)

    def _block(self, layer: int) -> Callable[..., Any]:
        return functools.partial(self.layers[layer].init, self.initializer_range)


@as_family.register
def _spelled_family(config: TopologyConfig) -> DecoderConfig:
    """The config of the family, `llama`, `dba` or `mixtral`, that has the same parameters and computes the same.

    Raises:
        ConfigError: there is none; the message says why.
    """
    first, *others = config.layers
    for number, layer in enumerate(others, 1):
        if (layer.structure, layer.kind) != (first.structure, first.kind):
            _refuse(f"layer {number} differs from layer 0")
    match [[part.node for part in item.parts] for item in first.items]:
        case [[RmsNormNode() as norm, AttentionNode() as attention], [RmsNormNode() as second, mlp]]:
            last = final_norm(config.topology)
            for one in (second, None if last is None else last.node):
                if one is None or dataclasses.replace(one, hidden_dim=None) != dataclasses.replace(
                    norm, hidden_dim=None
                ):
                    _refuse("its norms, of which the last one must be before the head, are not all the same")
        case _:
            _refuse("a layer is not a residual of rms_norm and attention, then one of rms_norm and swiglu, glu or moe")
    keys = {
        "num_layers": len(config.layers),
        "layer_norm_epsilon": norm.epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{item.name: getattr(config, item.name) for item in dataclasses.fields(ModelConfig)},
    }
    width, std = config.Embed.size, config.initializer_range
    family = dataclasses.replace(
        attention.family(width, std), **keys, **_mlp_keys(mlp), use_layer_norm_weight=norm.weight
    )
    if attention.rope is None:
        _refuse("its attention has no rotary embedding (rope: null)")
    if attention.dropout:
        _refuse(f"its attention has dropout ({attention.dropout})")
    if attention.mode != "decoupled" and attention.output_bias not in (None, attention.bias):
        _refuse(f"its attention has bias: {attention.bias} and output_bias: {attention.output_bias}")
    if not isinstance(mlp, MoeNode):
        return family
    if attention.mode == "decoupled" or attention.bias or not norm.weight:
        _refuse("it has moe with other attention or norms than Mixtral (mode: gqa, no bias, norms with weights)")
    if not mlp.norm_topk_prob:
        _refuse("its moe has norm_topk_prob: false")
    names = {item.name for item in dataclasses.fields(MixtralConfig)} & {
        item.name for item in dataclasses.fields(family)
    }
    return MixtralConfig(**{name: getattr(family, name) for name in names}, **mlp.router_keys)


def _mlp_keys(mlp: Any) -> dict[str, Any]:
    match mlp:
        case SwigluNode():
            return {"intermediate_dim": mlp.intermediate_dim, "mlp_bias": mlp.bias}
        case GluNode():
            keys = {"intermediate_dim": mlp.intermediate_dim, "mlp_bias": mlp.bias}
            return {**keys, "activation_function": mlp.activation_function}
        case MoeNode():
            return {"intermediate_dim": mlp.intermediate_dim, "activation_function": mlp.activation_function}
        case _:
            _refuse("its MLP is not swiglu, glu or moe")


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(
        f"{PATH}: this topology is not a family that Hugging Face's formats know, because {reason}. Known: llama, dba and"
        " mixtral. Spell one of them, or remove what reads or writes Hugging Face's format (hf_save_path, initialize_from_hf,"
        " jaxlm convert)"
    )


class TopologyModel(TransformerModel):
    """A transformer whose stacks may have layers of any structure."""

    tokens: Embedding
    body: Body
    head: Linear | None
    config: TopologyConfig = eqx.field(static=True)

    def embedded(
        self, inputs: Inputs, stream: NamedArray | None, key: jax.Array | None
    ) -> tuple[NamedArray, jax.Array | None]:
        return token_embeddings(for_lookup(self.tokens), inputs) if stream is None else stream, key
