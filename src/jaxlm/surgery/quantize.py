"""Stores frozen weights in few bits: the base of QLoRA.

Source: Dettmers et al. 2023, QLoRA: Efficient Finetuning of Quantized LLMs (arXiv:2305.14314). The forms are in
`jaxlm.core.products`. Only one layer at a time exists in floating point: it is made where it is used, in the loop over
layers, and made again in the backward pass.

    x --- W (nf4) -> floats of the compute dtype -------+--- out
      \\-- A -- B (float32, trained by the surgery lora) --/
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import ROUTES, VOCAB, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.parameters import float32_paths
from jaxlm.core.products.four_bit import MXFP4Weight, NF4Weight, NVFP4Weight
from jaxlm.core.products.stored_weights import HalfWeight, Int8Weight, StoredWeight
from jaxlm.core.rules import Rules, only
from jaxlm.models.base import LanguageModel
from jaxlm.models.linear import ExpertLinear, Linear
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import ArraySurgery, SurgeryConfig

Kind = Literal["nf4", "nvfp4", "mxfp4", "int8", "bfloat16", "float16"]
Layer = Linear | ExpertLinear


@choice(SurgeryConfig, "quantize")
class QuantizeConfig(ArraySurgery):
    """Stores the weights of linear layers in few bits. They stay as they are: freeze them, and train adapters on them (a
    surgery `lora` after this one, `trainable: ["\\\\.[ab]$"]`), norms or other layers. Products are computed in the compute
    dtype of `trainer.mp`. Exports have floating-point weights again, with the values that the stored ones stand for.

    Put it first, so that a run that starts from a Hugging Face folder stores each layer when it has read it.

    Attributes:
        kind: `nf4` (4.127 bits per parameter), `nvfp4` (4.5) and `mxfp4` (4.25, which keeps the values of folders in MXFP4)
            for linear layers and experts; `int8` with a scale for each output, `bfloat16` and `float16` for the head too.
        modules: regular expression searched for in the paths of linear layers; matching ones are stored. Null stores all
            except the head and routers.
        double_quant: quantize the scales of `nf4` too, to 8 bits. Without, they are float32 (4.5 bits per parameter).
    """

    kind: Kind = "nf4"
    modules: str | None = None
    double_quant: bool = True

    key_rules: ClassVar[Rules] = (only("double_quant", when="kind", is_="nf4", why="whose scales it quantizes"),)

    def on_read(self, model: LanguageModel) -> Mapping[str, Callable[[NamedArray], Any]]:
        chosen = self._chosen(model)
        return {f"{path}.weight": functools.partial(self._stored, layer) for path, layer in chosen.items()}

    def merge(self, model: LanguageModel) -> LanguageModel:
        is_stored = lambda node: isinstance(node, StoredWeight)  # noqa: E731
        ends = lambda node: is_stored(node) or isinstance(node, ExpertLinear)  # noqa: E731
        held, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda n: tree.is_named(n) or is_stored(n))
        own = float32_paths(model)
        others = (node for path, node in held if tree.dotted(path) not in own)
        # The widest, because a rule of `trainer.mp` may store some in fewer bits than products are computed in.
        dtype = jnp.result_type(*(leaf.dtype for leaf in others if not is_stored(leaf) and tree.is_inexact(leaf)))

        def merged(node: Any) -> Any:
            if not isinstance(node, ExpertLinear):
                return node.floats(dtype) if is_stored(node) else node
            if not isinstance(node.weight, StoredWeight):
                return node
            *stacked, _, _ = node.weight.axes
            return dataclasses.replace(node, weight=node.weight.floats(dtype).rearrange((*stacked, node.In, node.Out)))

        return jax.tree.map(merged, model, is_leaf=ends)

    def _stored(self, layer: Layer, weight: NamedArray) -> StoredWeight:
        """A weight of this layer, or of some of the layers that are stacked in it, in the form of `kind`."""
        if self.kind == "nf4":
            return NF4Weight.of(weight, layer.In, layer.Out, double_quant=self.double_quant)
        if self.kind == "nvfp4":
            return NVFP4Weight.of(weight, layer.In, layer.Out)
        if self.kind == "mxfp4":
            return MXFP4Weight.of(weight, layer.In, layer.Out)
        if self.kind == "int8":
            return Int8Weight.of(weight, layer.In)
        return HalfWeight(weight.astype(jnp.dtype(self.kind)))

    def _chosen(self, model: LanguageModel) -> dict[str, Layer]:
        """The layers to store, by path. Raises `ConfigError` if one of them cannot be."""
        prefix = "surgery quantize:"
        layers: dict[str, Layer] = dict(tree.modules_by_path(model, Linear)) | dict(
            tree.modules_by_path(model, ExpertLinear)
        )
        if not layers:
            raise ConfigError(
                f"{prefix} the model has no linear layers of jaxlm (Flax modules multiply on their own). Remove the surgery"
            )
        if self.modules is None:
            chosen = {path: layer for path, layer in layers.items() if not _outputs(layer) & {VOCAB, ROUTES}}
        else:
            pattern = tree.compile_pattern(self.modules, f"{prefix} modules")
            chosen = {path: layer for path, layer in layers.items() if pattern.search(path)}
            if not chosen:
                raise ConfigError(
                    f"{prefix} modules: '{self.modules}' matches no linear layer."
                    f" {tree.closest_paths(self.modules, list(layers))}"
                )
        for path, layer in chosen.items():
            if isinstance(layer.weight, StoredWeight):
                raise ConfigError(
                    f"{prefix} {path} is already stored as {layer.weight.form} by an earlier surgery. Set modules to other"
                    " layers here or there"
                )
            if self.kind in ("nf4", "nvfp4", "mxfp4") and VOCAB in _outputs(layer):
                raise ConfigError(
                    f"{prefix} kind: {self.kind} given, but {path} is the head, which the loss reads in slices, and blocks"
                    " of scales cannot be cut. Store it with kind: int8, bfloat16 or float16 (a second surgery quantize), and"
                    " set modules to the other layers here"
                )
        return chosen


def _outputs(layer: Layer) -> set[str]:
    return {axis.name for axis in axes_of(layer.Out)}


def describe_stored(model: LanguageModel) -> str | None:
    """Says what the stored weights of a model need, and would need in float32; None if there are none."""
    parts = []
    weights = tree.modules(model, StoredWeight)
    for form in dict.fromkeys(weight.form for weight in weights):
        alike = [weight for weight in weights if weight.form == form]
        size = sum(weight.size for weight in alike)
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(alike))
        parts.append(
            f"{size:,} parameters in {form}, {num_bytes / 1e6:,.1f} MB instead of {4 * size / 1e6:,.1f} MB in float32"
            f" ({8 * num_bytes / size:.3f} bits per parameter)"
        )
    return "; ".join(parts) or None
