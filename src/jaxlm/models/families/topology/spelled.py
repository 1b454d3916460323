"""The family that a topology spells out, if it does. Other programs know the model by that family."""

import dataclasses
from typing import Any, NoReturn, Protocol

from haliax import Axis

from jaxlm.core.errors import ConfigError
from jaxlm.models.base import ModelConfig
from jaxlm.models.decoder import DecoderConfig
from jaxlm.models.families.mixtral import MixtralConfig
from jaxlm.models.families.topology.layers import AttentionNode, GluNode, MoeNode, RmsNormNode, SwigluNode
from jaxlm.models.families.topology.nodes import Node
from jaxlm.models.families.topology.structure import PATH, TopologyLayer, final_norm


class Spelling(Protocol):
    """What describes a model by its layers."""

    @property
    def topology(self) -> Node: ...
    @property
    def layers(self) -> tuple[TopologyLayer, ...]: ...
    @property
    def Embed(self) -> Axis: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def spelled_family(config: Spelling) -> DecoderConfig:
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
