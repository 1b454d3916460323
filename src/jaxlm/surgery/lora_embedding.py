"""Adapters of an embedding table, and of a head that is tied to it.

Source: Hu et al. 2021 (arXiv:2106.09685); for embeddings as in the released code (microsoft/LoRA, `loralib/layers.py`)
and in PEFT: A is a table of its own, zero at the start, and B maps its rows to the embedding.
"""

import dataclasses

import equinox as eqx
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import LORA, VOCAB, axes_of
from jaxlm.core.products.float32_sums import rows_of
from jaxlm.core.products.matmul import dot
from jaxlm.models.base import LanguageModel
from jaxlm.models.layers import Embedding
from jaxlm.models.linear import Linear
from jaxlm.surgery.lora_linear import LoraLinear
from jaxlm.surgery.low_rank import LowRank


class LoraEmbedding(eqx.Module):
    """An embedding table with adapters.

    Attributes:
        base: the original table.
        lookup: the adapter of the lookup, from the vocabulary to the embedding; None for none.
        head: the adapter of the head, if it is tied to the table; None for none.
        tied: whether the table is also the head.
        shared: the tied head has the adapter of the lookup.
    """

    base: Embedding
    lookup: LowRank | None
    head: LowRank | None
    tied: bool = eqx.field(static=True)
    shared: bool = eqx.field(static=True)

    @property
    def Vocab(self) -> Axis:
        return self.base.Vocab

    @property
    def weight(self) -> NamedArray:
        """The weight of the tied head."""
        change = self.lookup if self.shared else self.head
        return self.base.weight if change is None else change.applied(self.base.weight)

    def __call__(self, ids: NamedArray) -> NamedArray:
        """{..} to {.., embed}."""
        rows = self.base(ids)
        if self.lookup is None:
            return rows
        low = dot(rows_of(self.lookup.a, self.base.Vocab.name, ids), self.lookup.b, LORA) * self.lookup.scales
        out = rows + low
        if self.lookup.magnitude is not None:
            out = out * self.lookup.factor(self.base.weight)
        return out.rearrange(rows.axes).astype(rows.dtype)

    def merged(self) -> "Embedding | UntiedEmbedding":
        """A table with the same rows and, if it is the head, the same logits. The two may differ now."""
        weight = self.base.weight if self.lookup is None else self.lookup.applied(self.base.weight)
        table = dataclasses.replace(self.base, weight=weight)
        return UntiedEmbedding(table, self.weight) if self.tied and not self.shared else table


class UntiedEmbedding(eqx.Module):
    """A table and a head that was tied to it before adapters were merged into the two.

    Attributes:
        table: the table of the lookup.
        weight: the weight of the head, {vocab, embed}.
    """

    table: Embedding
    weight: NamedArray

    @property
    def Vocab(self) -> Axis:
        return self.table.Vocab

    def __call__(self, ids: NamedArray) -> NamedArray:
        return self.table(ids)


def names_of(spec: AxisSpec) -> list[str]:
    """The names of axes."""
    return [axis.name for axis in axes_of(spec)]


def tied_table(model: LanguageModel) -> str | None:
    """The path of the token embedding, if the head is tied to it."""
    layers = (layer for kind in (Linear, LoraLinear) for layer in tree.modules(model, kind))
    if any(VOCAB in names_of(layer.Out) for layer in layers):
        return None
    paths = (path for path, _ in tree.modules_by_path(model, Embedding))
    return next((path for path in paths if path.split(".")[-1] == "tokens"), None)


def table_names(model: LanguageModel) -> list[str]:
    """What `embeddings` is searched for in: the paths of tables, and the name of a head that is tied to one."""
    tied = tied_table(model)
    tables = [path for path, _ in tree.modules_by_path(model, Embedding)]
    return tables + ([] if tied is None else [head_of(tied)])


def head_of(tokens: str) -> str:
    """The name of the head that is tied to the table at a path."""
    return f"{tokens.rpartition('.')[0]}.head".lstrip(".")
