r"""Layers with low-rank adapters: the change W + scale * B A, how it starts, and DoRA's magnitudes.

The linear layer (`LoraLinear`):

x {.., In} --- W (frozen) -------------------------------------+--- {.., Out}
           \-- dropout -- A {rank, In} -- B {Out, rank} * scale --/

The linear layer of an expert (`LoraExperts`) has an A and a B of its own.

Of an embedding table, and of a head that is tied to it (`LoraEmbedding`), A is a table of its own, zero at the start, and B
maps its rows to the embedding.

With DoRA, every output has a magnitude m that trains, W' = m (W + scale * B A) / ||W + scale * B A|| with the norm over the
inputs. The norm gets no gradient.

If ranks differ between the layers of a stack, all arrays have the largest rank. Entries beyond a layer's rank are zero in A
and in B. They are never read, so their gradient is zero and most optimizers leave them zero; some that mix rows (`kron`) do
not.

Adapters start at random, from the weight that they change, or from the inputs of their layer:

    pissa   A = sqrt(S / scale) V^T, B = U sqrt(S / scale) of the largest singular values; the weight keeps the rest
    olora   A = the first rows of R, B = the first columns of Q, of the weight's QR decomposition; likewise
    eva     A = the principal components of the inputs, B = 0

Where the papers leave it open, as PEFT has it (`peft/tuners/lora/layer.py`, `eva.py`): decompositions in float32, PiSSA
divides the singular values by the adapter's scale, OLoRA does not, and EVA centers the inputs. Signs follow PEFT's EVA: the
entry of each row of A with the largest absolute value is positive.

Source:
    LoRA: Hu et al. 2021 (arXiv:2106.09685), section 4.1; for embeddings as in the released code (microsoft/LoRA,
    `loralib/layers.py`) and in PEFT.
    DoRA: Liu et al. 2024, DoRA: Weight-Decomposed Low-Rank Adaptation (arXiv:2402.09353), equation 5, and section 4.3 for
    the norm.
    PiSSA: Meng et al. 2024, PiSSA: Principal Singular Values and Singular Vectors Adaptation (arXiv:2404.02948), equations
    2 to 4.
    OLoRA: Büyükakyüz 2024, OLoRA: Orthonormal Low-Rank Adaptation (arXiv:2406.01775), algorithm 1.
    EVA: Paischer et al. 2024, Explained Variance Adaptation (arXiv:2410.07170), section 3, with the same rank for all
    layers (rho = 1).
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import EXPERTS, LAYERS, LORA, VOCAB, axes_of
from jaxlm.core.parameters import SCALE, TABLE, DeclaresParameters, Parameter, matrix
from jaxlm.core.products.float32_sums import rows_of, shifted
from jaxlm.core.products.matmul import dot
from jaxlm.core.products.stored_weights import Weight
from jaxlm.models.base import LanguageModel
from jaxlm.models.layers import DropoutLayer, Embedding, dropout
from jaxlm.models.linear import AdaptedMatrices, ExpertLinear, Linear
from jaxlm.models.remat import ADAPTED, checkpoint_name
from jaxlm.surgery.input_moments import InputMoments, by_layer, flat, named


@dataclass(frozen=True)
class AdapterSize:
    """Rank and scale of one adapter. Rank 0 means no adapter."""

    rank: int
    scale: float


class LowRank(tree.Padded, DeclaresParameters):
    """scale * B A, and DoRA's magnitudes if there are any.

    Attributes:
        a: {layers, experts, lora_rank, *In}; without `layers` if the weight is not stacked, and only those of experts have
            that axis.
        b: {layers, experts, *Out, lora_rank}, likewise.
        scale: multiplier of B A.
        magnitude: {layers, *Out}, likewise; None without DoRA.
        layer: int32 {layers}, the index of each layer into `sizes`; None if all layers have the same rank and scale.
        sizes: of all layers.
    """

    a: NamedArray
    b: NamedArray
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    magnitude: NamedArray | None = None
    layer: NamedArray | None = None
    sizes: tuple[AdapterSize, ...] = eqx.field(static=True, default=())

    @staticmethod
    def of(
        weight: Weight,
        In: AxisSpec,
        Out: AxisSpec,
        sizes: Sequence[AdapterSize],
        *,
        key: jax.Array,
        starts: Literal["a", "b"] = "a",
        use_dora: bool = False,
    ) -> "LowRank":
        """A change that is initially zero.

        Args:
            sizes: one, or one for each layer.
            starts: `a` starts uniform within +-1/sqrt(fan in) and B as zero; `b` starts as N(0, 1) and A as zero.
        """
        rank = max(size.rank for size in sizes)
        Rank, inputs, outputs = Axis(LORA, rank), axes_of(In), axes_of(Out)
        stacked = tuple(axis for axis in weight.axes if axis not in (*inputs, *outputs))
        if starts == "a":
            bound = 1.0 / math.sqrt(hax.axis_size(inputs))
            a = hax.random.uniform(key, (*stacked, Rank, *inputs), minval=-bound, maxval=bound)
            b = hax.zeros((*stacked, *outputs, Rank))
        else:
            a, b = hax.zeros((*stacked, Rank, *inputs)), hax.random.normal(key, (*stacked, *outputs, Rank))
        layer = None
        if len(set(sizes)) > 1:
            (Layers,) = (axis for axis in stacked if axis.name == LAYERS)
            layer = hax.arange(Layers, dtype=jnp.int32)
            ranks = NamedArray(jnp.asarray([size.rank for size in sizes]), (Layers,))
            a, b = (_within(array, ranks) for array in (a, b))
        new = LowRank(a, b, In, Out, sizes[0].scale, None, layer, tuple(sizes) if layer is not None else ())
        if not use_dora:
            return new
        magnitude = new.norms(weight)
        if layer is not None:  # a layer without an adapter has no magnitudes either
            magnitude = (magnitude * (new.ranks > 0)).rearrange(magnitude.axes)
        return eqx.tree_at(lambda it: it.magnitude, new, magnitude, is_leaf=lambda x: x is None)

    def with_values(self, a: NamedArray, b: NamedArray) -> "LowRank":
        """The change with other values of A and B, which are cut off at the rank of their layer."""
        if self.layer is not None:
            a, b = (_within(array, self.ranks) for array in (a, b))
        return eqx.tree_at(lambda it: (it.a, it.b), self, (a, b))

    @property
    def scales(self) -> float | NamedArray:
        """The multiplier of B A, or that of each layer."""
        return self.scale if self.layer is None else self._by_layer([size.scale for size in self.sizes], self.a.dtype)

    @property
    def inner(self) -> NamedArray:
        """A, without what is beyond the rank of its layer."""
        return self.a if self.layer is None else _within(self.a, self.ranks)

    @property
    def ranks(self) -> NamedArray:
        """The rank of each layer, if they differ."""
        return self._by_layer([size.rank for size in self.sizes], jnp.int32)

    def applied(self, weight: Weight) -> NamedArray:
        """The changed weight, in its dtype."""
        dtype = weight.dtype if isinstance(weight, NamedArray) else self.a.dtype
        exact = weight if isinstance(weight, NamedArray) else weight.floats(dtype)
        delta = hax.dot(self.b, self.inner, axis=LORA) * self.scales
        changed = exact + delta.rearrange(exact.axes).astype(dtype)
        if self.magnitude is None:
            return changed
        return (changed * self.factor(weight)).rearrange(exact.axes).astype(dtype)

    def factor(self, weight: Weight) -> NamedArray:
        """Returns the factor of DoRA for the outputs of the changed weight, magnitude / norm, in float32 {layers, *Out}."""
        assert self.magnitude is not None
        norms = self.norms(weight)
        known = norms > 0
        if self.layer is not None:
            known = known & (self.ranks > 0)
        known = known.rearrange(norms.axes)
        magnitude = self.magnitude.rearrange(norms.axes).astype(jnp.float32)
        return hax.where(known, magnitude / hax.where(known, norms, 1.0), 1.0)

    def norms(self, weight: Weight) -> NamedArray:
        """||W + scale * B A|| over the inputs, in float32 {layers, *Out}, without a gradient."""
        exact = weight.astype(jnp.float32) if isinstance(weight, NamedArray) else weight.floats(jnp.float32)
        exact, a, b = jax.lax.stop_gradient((exact, self.inner.astype(jnp.float32), self.b.astype(jnp.float32)))
        changed = exact + (hax.dot(b, a, axis=LORA) * self.scales).rearrange(exact.axes)
        return hax.sqrt(hax.sum(changed * changed, axis=self.In))

    def padding(self) -> dict[str, int]:
        ranks = [size.rank for size in self.sizes]
        arrays = [
            leaf for leaf in (self.a, self.b, self.magnitude) if leaf is not None
        ]  # frozen or masked leaves are None
        # A part of a stack does not know which of the layers it has.
        if not ranks or not arrays or arrays[0].axis_size(LAYERS) != len(ranks):
            return {}
        each = math.prod(axis.size for axis in arrays[0].axes if axis.name == EXPERTS)
        inputs, outputs = (each * hax.axis_size(spec) for spec in (self.In, self.Out))
        unused = sum(max(ranks) - rank for rank in ranks)
        return {"a": unused * inputs, "b": unused * outputs, "magnitude": ranks.count(0) * outputs}

    def parameters(self) -> dict[str, Parameter]:
        """Describes the adapter of an embedding. `LoraLinear` describes its own."""
        return dict.fromkeys(("a", "b", "magnitude"), TABLE)

    def _by_layer(self, values: Sequence[float], dtype) -> NamedArray:
        assert self.layer is not None
        return NamedArray(jnp.asarray(values, dtype)[self.layer.array], self.layer.axes)


def _within(array: NamedArray, ranks: NamedArray) -> NamedArray:
    """An array of adapters with zeros beyond the rank of each layer."""
    Rank = array.resolve_axis(LORA)
    used = hax.arange(Rank) < ranks.broadcast_axis(Rank)
    return hax.where(used.broadcast_to(array.axes), array, 0)


Init = Literal["default", "pissa", "olora", "eva"]
SPLITS_WEIGHT = ("pissa", "olora")  # move a part of the weight into the adapter


def split_weight(weight: NamedArray, change: LowRank, init: str) -> tuple[NamedArray, LowRank]:
    """The weight without a part of low rank, and the change that is this part. They add up to the weight."""
    inputs, outputs, rank = axes_of(change.In), axes_of(change.Out), change.a.axis_size(LORA)
    stacked = tuple(axis for axis in weight.axes if axis not in (*inputs, *outputs))
    matrices = flat(weight, stacked, outputs, inputs)
    # A layer without an adapter has the scale 0. What becomes of it is cut off.
    scales = jnp.broadcast_to(jnp.asarray(getattr(change.scales, "array", change.scales)), matrices.shape[:1])

    def factors(matrix: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        if init == "pissa":
            u, s, vh = jnp.linalg.svd(matrix, full_matrices=False)
            root = jnp.sqrt(s[:rank] / scale)
            return _signed(root[:, None] * vh[:rank], u[:, :rank] * root)
        q, r = jnp.linalg.qr(matrix)
        return _signed(r[:rank], q[:, :rank])

    a, b = by_layer(factors, matrices, scales)
    change = change.with_values(*(named(new, old) for new, old in ((a, change.a), (b, change.b))))
    delta = (hax.dot(change.b, change.a, axis=LORA) * change.scales).rearrange(weight.axes)
    return (weight.astype(jnp.float32) - delta).astype(weight.dtype), change


def principal_components(moments: InputMoments, rank: int) -> tuple[jax.Array, jax.Array]:
    """The principal components of the inputs [layers, rank, in], by layer, and the share of the variance that each explains.

    Layers that are not stacked are one.
    """
    stacked = moments.count.axes
    inputs = tuple(axis for axis in moments.total.axes if axis not in stacked)
    others = tuple(axis for axis in moments.products.axes if axis not in moments.total.axes)
    count = moments.count.array.reshape(-1)
    total, products = flat(moments.total, stacked, inputs), flat(moments.products, stacked, inputs, others)

    def components(count: jax.Array, total: jax.Array, products: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = total / count
        values, vectors = jnp.linalg.eigh(products / count - jnp.outer(mean, mean))
        values, rows = values[::-1], vectors.T[::-1]
        rows, _ = _signed(rows[:rank], rows[:rank].T)
        return rows, values[:rank] / jnp.sum(values)

    return by_layer(components, count, total, products)


def eva(change: LowRank, moments: InputMoments) -> LowRank:
    """The change, still zero, with the principal components of the inputs as A."""
    rows, _ = principal_components(moments, change.a.axis_size(LORA))
    return change.with_values(named(rows, change.a), change.b)


def as_bits(array: NamedArray) -> NamedArray:
    """Float32 values as integers, which neither train nor are rounded."""
    return NamedArray(jax.lax.bitcast_convert_type(array.array.astype(jnp.float32), jnp.int32), array.axes)


def from_bits(bits: NamedArray) -> NamedArray:
    """The inverse of `as_bits`."""
    return NamedArray(jax.lax.bitcast_convert_type(bits.array, jnp.float32), bits.axes)


def _signed(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = jnp.take_along_axis(a, jnp.argmax(jnp.abs(a), axis=1, keepdims=True), axis=1)
    signs = jnp.where(largest[:, 0] < 0, -1.0, 1.0)
    return a * signs[:, None], b * signs


class LoraLinear(DropoutLayer, tree.Padded, DeclaresParameters):
    """A linear layer with a low-rank adapter.

    Attributes:
        base: the original layer.
        a, b, scale, magnitude, layer, sizes: as in `LowRank`.
        dropout: dropout probability of the adapter's input.
        key: random key for dropout; None outside training.
        initial_a, initial_b: A and B at the start, if `init` has moved a part of the weight into them (`as_bits`). Exported
            adapters, which are for the weight before that, contain them.
    """

    base: Linear
    a: NamedArray
    b: NamedArray
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True, default=0.0)
    key: jax.Array | None = None
    magnitude: NamedArray | None = None
    layer: NamedArray | None = None
    sizes: tuple[AdapterSize, ...] = eqx.field(static=True, default=())
    initial_a: NamedArray | None = None
    initial_b: NamedArray | None = None

    @staticmethod
    def sized(
        base: Linear,
        sizes: Sequence[AdapterSize],
        *,
        dropout: float,
        use_dora: bool,
        key: jax.Array,
        init: Init = "default",
    ) -> "LoraLinear":
        """Adds an adapter that does not change the outputs. Args: sizes: one, or one for each layer."""
        new = LowRank.of(base.weight, base.In, base.Out, sizes, key=key, use_dora=use_dora)
        initial: tuple[NamedArray | None, ...] = (None, None)
        if init in SPLITS_WEIGHT:
            assert isinstance(base.weight, NamedArray), "stored weights are refused"
            weight, new = split_weight(base.weight, new, init)
            base, initial = dataclasses.replace(base, weight=weight), (as_bits(new.a), as_bits(new.b))
        return LoraLinear(base, new.a, new.b, new.scale, dropout, None, new.magnitude, new.layer, new.sizes, *initial)

    @property
    def change(self) -> LowRank:
        """The change that the adapter adds to the weight."""
        return LowRank(self.a, self.b, self.base.In, self.base.Out, self.scale, self.magnitude, self.layer, self.sizes)

    @property
    def exported_pair(self) -> tuple[NamedArray, NamedArray, int]:
        """A and B for the weight before `init` changed it, and how many of their ranks stand for one of the adapter's.

        s B A - s B0 A0 has twice the rank: [B, -B0] [A; A0], with the ranks of the two in turns.
        """
        if self.initial_a is None or self.initial_b is None:
            return self.a, self.b, 1
        a0, b0 = from_bits(self.initial_a), from_bits(self.initial_b)
        return _in_turns(self.a, a0), _in_turns(self.b, -b0), 2

    def __call__(self, inputs: NamedArray) -> NamedArray:
        """{.., In} to {.., Out}."""
        dropped = dropout(inputs, self.dropout, self.key)
        change = self.change
        low = dot(dot(dropped, change.inner, self.base.In), self.b, LORA) * change.scales
        if self.magnitude is not None:
            return self._with_magnitude(inputs, dropped, low)
        out = (self.base(inputs) + low).astype(inputs.dtype)
        return checkpoint_name(out, ADAPTED)

    def _with_magnitude(self, inputs: NamedArray, dropped: NamedArray, low: NamedArray) -> NamedArray:
        """W x + (f - 1) W x' + f low + bias, with the dropped inputs x' and f = magnitude / norm, as PEFT computes it."""
        linear = dataclasses.replace(self.base, bias=None)
        factor = checkpoint_name(self.change.factor(self.base.weight), ADAPTED)
        changed = checkpoint_name(linear(dropped) + low, ADAPTED)
        out = (changed * factor).rearrange(changed.axes)
        if self.key is not None:
            out = out + linear(inputs - dropped)
        if self.base.bias is not None:
            out = shifted(out, self.base.bias)
        return out.astype(inputs.dtype)

    def operand(self, x: NamedArray) -> NamedArray:
        """As `Linear.operand`."""
        return self.base.operand(x)

    def with_key(self, key: jax.Array) -> "LoraLinear":
        """Returns the layer with this dropout key, or unchanged if it has no dropout."""
        return dataclasses.replace(self, key=key) if self.dropout else self

    def for_part(self, number: jax.Array) -> "LoraLinear":
        return self if self.key is None else self.with_key(jax.random.fold_in(self.key, number))

    def padding(self) -> dict[str, int]:
        return self.change.padding()

    def parameters(self) -> dict[str, Parameter]:
        outputs, inputs = axes_of(self.Out), axes_of(self.In)
        a = {} if self.a is None else {"a": matrix([self.a.resolve_axis(LORA)], inputs)}
        b = {} if self.b is None else {"b": matrix(outputs, [self.b.resolve_axis(LORA)])}
        return {**a, **b, "magnitude": SCALE}

    @property
    def In(self) -> AxisSpec:
        return self.base.In

    @property
    def Out(self) -> AxisSpec:
        return self.base.Out

    @property
    def weight(self) -> Weight:
        """The merged weight, which the loss reads if the head is adapted."""
        return self.merged().weight

    def merged(self) -> Linear:
        """Merges the adapter into a plain layer with the same output."""
        return dataclasses.replace(self.base, weight=self.change.applied(self.base.weight))


def _in_turns(first: NamedArray, second: NamedArray) -> NamedArray:
    """Both arrays in one of twice the rank: the first of each, the second of each, and so on."""
    at = first.axes.index(first.resolve_axis(LORA))
    both = jnp.stack([first.array.astype(jnp.float32), second.array], axis=at + 1)
    Rank = hax.Axis(LORA, 2 * first.axis_size(LORA))
    axes = tuple(Rank if axis.name == LORA else axis for axis in first.axes)
    return NamedArray(both.reshape([axis.size for axis in axes]), axes)


class LoraExperts(tree.Padded, DeclaresParameters):
    """One linear layer per expert, each with a low-rank adapter.

    Attributes:
        base: the original layers.
        a, b, scale, layer, sizes: as in `LowRank`.
    """

    base: ExpertLinear
    a: NamedArray
    b: NamedArray
    scale: float = eqx.field(static=True)
    layer: NamedArray | None = None
    sizes: tuple[AdapterSize, ...] = eqx.field(static=True, default=())

    @staticmethod
    def sized(base: ExpertLinear, sizes: Sequence[AdapterSize], *, key: jax.Array) -> "LoraExperts":
        """Adds adapters that do not change the outputs. Args: sizes: one, or one for each layer."""
        new = LowRank.of(base.weight, base.In, base.Out, sizes, key=key)
        return LoraExperts(base, new.a, new.b, new.scale, new.layer, new.sizes)

    @property
    def change(self) -> LowRank:
        """The change that the adapters add to the weights."""
        return LowRank(self.a, self.b, self.base.In, self.base.Out, self.scale, None, self.layer, self.sizes)

    def matrices(self) -> AdaptedMatrices:
        """As `ExpertLinear.matrices`."""
        change, (In, Out) = self.change, (self.base.In.name, self.base.Out.name)
        a_EIL = change.inner.rearrange((EXPERTS, In, LORA)).array
        b_ELO = (self.b * change.scales).rearrange((EXPERTS, LORA, Out)).array.astype(self.b.dtype)
        return AdaptedMatrices(self.base.matrices(), a_EIL, b_ELO)

    def padding(self) -> dict[str, int]:
        return self.change.padding()

    def parameters(self) -> dict[str, Parameter]:
        a = {} if self.a is None else {"a": matrix([self.a.resolve_axis(LORA)], [self.base.In])}
        b = {} if self.b is None else {"b": matrix([self.base.Out], [self.b.resolve_axis(LORA)])}
        return {**a, **b}

    @property
    def weight(self) -> Weight:
        """The weights without the adapters."""
        return self.base.weight

    def merged(self) -> ExpertLinear:
        """Merges the adapters into plain layers with the same outputs."""
        return dataclasses.replace(self.base, weight=self.change.applied(self.base.weight))


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


class UntiedEmbedding(DeclaresParameters):
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

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": TABLE}


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
    """Lists what `embeddings` is searched for in: the paths of tables, and the name of a head that is tied to one."""
    tied = tied_table(model)
    tables = [path for path, _ in tree.modules_by_path(model, Embedding)]
    return tables + ([] if tied is None else [head_of(tied)])


def head_of(tokens: str) -> str:
    """The name of the head that is tied to the table at a path."""
    return f"{tokens.rpartition('.')[0]}.head".lstrip(".")
