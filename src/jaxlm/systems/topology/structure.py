"""Divides a topology into the layers of a body: what it has from one attention to the next.

Each attention has one entry in the KV cache. What a unit has before its first attention belongs to the unit's first layer.
So a unit that is repeated becomes layers that repeat, and these run as a scan. Layers with the same parts are in the same
stack.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import equinox as eqx
import jax
from haliax import NamedArray

from jaxlm.core.errors import ConfigError
from jaxlm.models.decoder import DecoderBlock, TransformerConfig
from jaxlm.models.decoders.moe_decoder import MoeBlock
from jaxlm.models.layers import GatedMlp, Mlp
from jaxlm.models.mixers.attention import Attention, SelfAttention
from jaxlm.models.mixers.base import ForCache, LayerCache, LayerContext
from jaxlm.models.moe import Experts
from jaxlm.models.norms import LayerNorm, Norm, RMSNorm, UnweightedLayerNorm, UnweightedRMSNorm
from jaxlm.models.routing import RouterStats
from jaxlm.models.stacks import Block, LayerKind
from jaxlm.systems.topology.layers import (
    AttentionNode,
    Dropout,
    GroupNode,
    LayerNode,
    LayerNormNode,
    MoeNode,
    NestedNode,
    Node,
    Projection,
    ResidualNode,
    RmsNormNode,
    StackedNode,
)

Part = Union["Residual", Attention, Norm, Projection, Mlp, GatedMlp, Experts, Dropout]


class Residual(eqx.Module):
    """x + f(x).

    Attributes:
        parts: name -> part of f.
        order: the names, from first to last.
    """

    parts: dict[str, Part]
    order: tuple[str, ...] = eqx.field(static=True)


class TopologyBlock(eqx.Module):
    """Parts that run one after the other. At most one of them is, or contains, attention, and one experts.

    Attributes:
        parts: name -> part.
        order: the names, from first to last.
    """

    parts: dict[str, Part]
    order: tuple[str, ...] = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, context: LayerContext, layer_cache: LayerCache | None, *, key: jax.Array | None, **_: Any
    ) -> tuple[NamedArray, ForCache, RouterStats | None]:
        run = _Run(context, layer_cache, key)
        out = run.sequence(self, x).rearrange(x.axes)
        assert run.new is not None, "every block has attention"
        return out, run.new, run.stats


@dataclass
class _Run:
    """A pass through one block, with what its attention and its experts return besides their output."""

    context: LayerContext
    layer_cache: LayerCache | None
    key: jax.Array | None
    new: ForCache | None = None
    stats: RouterStats | None = None
    num_keys: int = 0

    def sequence(self, whole: Residual | TopologyBlock, x: NamedArray) -> NamedArray:
        for name in whole.order:
            x = self._part(whole.parts[name], x)
        return x

    def _part(self, part: Any, x: NamedArray) -> NamedArray:
        match part:
            case Residual():
                return x + self.sequence(part, x)
            case Attention():
                out, self.new = part(x, self.context, self.layer_cache, key=self._next_key())
                return out
            case Experts():
                out, self.stats = part(x, self.context.attention_mask.segment_ids)
                return out
            case Dropout():
                return part(x, self._next_key())
            case _:
                return part(x)

    def _next_key(self) -> jax.Array | None:
        """A key for each part that has dropout."""
        self.num_keys += 1
        return None if self.key is None else jax.random.fold_in(self.key, self.num_keys)


PATH = "model.topology"
_NORMS = (RMSNorm, UnweightedRMSNorm, LayerNorm, UnweightedLayerNorm)
_MLPS = (Mlp, GatedMlp, Experts)


@dataclass(frozen=True)
class Item:
    """A layer of a topology, or a residual.

    Attributes:
        path: where it is in the configuration, for messages.
        parts: of a residual, with groups written out.
    """

    node: LayerNode | ResidualNode
    path: str
    parts: tuple["Item", ...] = ()

    @property
    def structure(self) -> Any:
        """The same for all items with the same parameters that compute the same, apart from their `LayerKind`."""
        if not isinstance(self.node, LayerNode):
            return tuple(part.structure for part in self.parts)
        node = self.node.structure if isinstance(self.node, AttentionNode) else self.node
        return dataclasses.replace(node, hidden_dim=None)

    def all_of(self, kind: type) -> list["Item"]:
        """The layers of this kind, here or in a residual."""
        return [self] * isinstance(self.node, kind) + [item for part in self.parts for item in part.all_of(kind)]

    def check(self, width: int) -> None:
        """Raises `ConfigError` if no `width` features can come in, or others come out."""
        out = self._check(width)
        if out != width:
            raise ConfigError(
                f"{self.path}: {width} features come in and {out} come out, but outside of a residual every layer must keep"
                f" hidden_dim = {width}. Set output_dim: {width}, or put it into a residual with what maps back"
            )

    def _check(self, width: int) -> int:
        if isinstance(self.node, LayerNode):
            self.node.check(width, self.path)
            return self.node.output_width(width)
        out = width
        for part in self.parts:
            out = part._check(out)
        if out != width:
            raise ConfigError(
                f"{self.path}: x has {width} features and f(x) has {out}, so they cannot be added. Let the last layer of the"
                f" residual have {width} output features (output_dim: {width})"
            )
        return width

    def layers(self, width: int) -> Iterator[tuple[LayerNode, int]]:
        """The layers, with the number of features that come in."""
        if isinstance(self.node, LayerNode):
            yield self.node, width
        for part in self.parts:
            yield from part.layers(width)
            width = part.output_width(width)

    def output_width(self, width: int) -> int:
        """Features of the output, for an input of `width` features."""
        return self.node.output_width(width) if isinstance(self.node, LayerNode) else width

    def init(self, width: int, std: float, *, key: jax.Array) -> Any:
        """Initializes it for an input of `width` features."""
        if isinstance(self.node, LayerNode):
            return self.node.init(width, std, key=key)
        return Residual(**_named(self.parts, width, std, key=key))


def _named(items: Sequence[Item], width: int, std: float, *, key: jax.Array) -> dict[str, Any]:
    """Initializes items that run one after the other: the fields of a `Residual` or a `TopologyBlock`."""
    parts: dict[str, Any] = {}
    for item, item_key in zip(items, jax.random.split(key, len(items)), strict=True):
        role = item.node.role if isinstance(item.node, LayerNode) else "residual"
        names = itertools.chain([role], (f"{role}_{number}" for number in itertools.count(2)))
        parts[next(name for name in names if name not in parts)] = item.init(width, std, key=item_key)
        width = item.output_width(width)
    return {"parts": parts, "order": tuple(parts)}


@dataclass(frozen=True)
class TopologyLayer:
    """A layer of the body: items with one attention among them."""

    items: tuple[Item, ...]
    width: int

    @property
    def attention(self) -> AttentionNode:
        """Its attention."""
        return next(node for node, _ in self.layers() if isinstance(node, AttentionNode))

    @property
    def family(self) -> TransformerConfig:
        """The config of a model with one layer, whose attention this is."""
        return next(node.family(width) for node, width in self.layers() if isinstance(node, AttentionNode))

    @property
    def kind(self) -> LayerKind:
        """The kind of the layer: what is static about it."""
        return next(node.kind(width) for node, width in self.layers() if isinstance(node, AttentionNode))

    @property
    def structure(self) -> Any:
        """The same for all layers that can be in one stack."""
        return tuple(item.structure for item in self.items)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """It as part of a topology."""
        return tuple(item.node for item in self.items)

    def layers(self) -> Iterator[tuple[LayerNode, int]]:
        """The layers of the topology, with the number of features that come in."""
        for item in self.items:
            yield from item.layers(self.width)

    def check(self) -> None:
        """Raises `ConfigError` if it cannot be built."""
        for item in self.items:
            item.check(self.width)
        moes = [item for part in self.items for item in part.all_of(MoeNode)]
        if len(moes) > 1:
            raise ConfigError(
                f"{moes[1].path}: a second moe after the same attention; the first is {moes[0].path}. The statistics of a"
                " router are kept once per attention. Put attention between the two"
            )

    def init(self, std: float, *, key: jax.Array) -> Block:
        """Initializes it. A layer of a family is that family's block, so that its parameters have the same paths."""
        named = _named(self.items, self.width, std, key=key)
        return _family_block([named["parts"][name] for name in named["order"]]) or TopologyBlock(**named)


def _family_block(parts: Sequence[Any]) -> Block | None:
    """The block that a residual with attention and one with an MLP are, each with at most one norm before and after it."""
    if len(parts) != 2 or not all(isinstance(part, Residual) for part in parts):
        return None
    attention, mlp = _between_norms(parts[0], Attention), _between_norms(parts[1], _MLPS)
    if attention is None or mlp is None:
        return None
    if not isinstance(mlp[1], Experts):
        return DecoderBlock(*attention[:2], *mlp[:2], attention[2], mlp[2])
    has_dropout = isinstance(attention[1], SelfAttention) and attention[1].dropout > 0  # a `MoeBlock` has none
    is_plain = attention[2] is None and mlp[2] is None and None not in (attention[0], mlp[0])
    return MoeBlock(*attention[:2], *mlp[:2]) if is_plain and not has_dropout else None


def _between_norms(residual: Residual, kinds: Any) -> tuple[Any, Any, Any] | None:
    """(norm before, module of one of these kinds, norm after) of a residual that consists of these; None for no norm."""
    parts = [residual.parts[name] for name in residual.order]
    at = next((at for at, part in enumerate(parts) if isinstance(part, kinds)), None)
    if (
        at is None
        or at > 1
        or len(parts) > at + 2
        or not all(isinstance(norm, _NORMS) for norm in parts[:at] + parts[at + 1 :])
    ):
        return None
    return (parts[0] if at else None), parts[at], (parts[at + 1] if len(parts) > at + 1 else None)


@functools.lru_cache(maxsize=256)
def layers_of(topology: Node, hidden_dim: int) -> tuple[TopologyLayer, ...]:
    """The layers of the body, without the final norm.

    Raises:
        ConfigError: it cannot be divided into layers.
    """
    divided = _divided(_without_final_norm(topology, PATH)[0], PATH)
    if not divided.layers:
        raise ConfigError(f"{PATH}: no attention given. A topology needs at least one layer of type attention")
    return tuple(TopologyLayer(tuple(items), hidden_dim) for items in divided.layers)


def final_norm(topology: Node) -> Item | None:
    """The norm with which a topology ends; None if it ends in another way, or within a unit that is repeated."""
    return _without_final_norm(topology, PATH)[1]


def _without_final_norm(node: Node, path: str) -> tuple[Node, Item | None]:
    if not isinstance(node, StackedNode) or not node.layers:
        return node, None
    *others, last = node.layers
    at = f"{path}.layers.{len(others)}"
    if isinstance(last, RmsNormNode | LayerNormNode):
        return StackedNode(layers=others), Item(last, at)
    last, norm = _without_final_norm(last, at)
    return StackedNode(layers=[*others, last]), norm


def check_groups(node: Node, path: str = PATH) -> None:
    """Raises `ConfigError` if a group has no layers."""
    if isinstance(node, GroupNode):
        if not node.layers:
            raise ConfigError(f"{path}.layers: [] given, at least one layer expected")
        for number, inner in enumerate(node.layers):
            check_groups(inner, f"{path}.layers.{number}")


@dataclass
class _Divided:
    """Nodes that run one after the other.

    Attributes:
        leading: the items before the first attention.
        layers: the items by layer of the body, once there is.
    """

    leading: list[Item] = field(default_factory=list)
    layers: list[list[Item]] = field(default_factory=list)

    def extend(self, others: "_Divided") -> None:
        """Adds nodes. Their first layer also gets what comes before it, unless that belongs to another layer."""
        if others.layers:
            first, *rest = others.layers
            self.layers += [[*self.leading, *first], *map(list, rest)]
            self.leading = []
        else:
            (self.layers[-1] if self.layers else self.leading).extend(others.leading)


def _divided(node: Node, path: str) -> _Divided:
    if not isinstance(node, StackedNode | NestedNode):
        (item,) = _items(node, path)
        return _Divided(layers=[[item]]) if item.all_of(AttentionNode) else _Divided([item])
    unit, whole = _Divided(), _Divided()
    for number, inner in enumerate(node.layers):
        unit.extend(_divided(inner, f"{path}.layers.{number}"))
    for _ in range(_repeats(node)):
        whole.extend(unit)
    return whole


def _items(node: Node, path: str) -> list[Item]:
    """The layers and residuals of a node, with its groups written out."""
    if isinstance(node, LayerNode):
        return [Item(node, path)]
    assert isinstance(node, GroupNode)
    inner = [item for number, one in enumerate(node.layers) for item in _items(one, f"{path}.layers.{number}")]
    if not isinstance(node, ResidualNode):
        return inner * _repeats(node)
    attentions = [item.path for part in inner for item in part.all_of(AttentionNode)]
    if len(attentions) > 1:
        places = ", ".join(dict.fromkeys(attentions))
        raise ConfigError(
            f"{path}: {len(attentions)} attention layers in one residual ({places}), at most one expected: each is a layer"
            " of its own in the scan and in the KV cache. Put a residual around each of them"
        )
    return [Item(node, path, tuple(inner))]


def _repeats(node: Node) -> int:
    return node.repeat if isinstance(node, NestedNode) else 1
