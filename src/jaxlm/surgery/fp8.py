"""FP8: the matrix products of linear layers in 8-bit floating point, in training.

Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv:2209.05433), section 3.
`jaxlm.core.products.fp8.Fp8` says how numbers are quantized. Which layers: as `nanochat` selects them; the limits are
those of NVIDIA's matrix units.

    x  --- e4m3 ---+                      d_out --- e5m2 ---+--- times w: gradient of x
                   +--- product --- out                     +--- times x: gradient of w
    w  --- e4m3 ---+
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import haliax as hax
import jax
from haliax import NamedArray

from jaxlm.core import tree
from jaxlm.core.axes import ROUTES, VOCAB, axes_of
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.products.fp8 import Fp8
from jaxlm.models.base import LanguageModel, with_traits
from jaxlm.models.linear import Linear
from jaxlm.reading.choices import choice
from jaxlm.surgery.base import SurgeryConfig, Wants

HEAD = "head"
_MULTIPLE = 16  # of both sizes of a matrix: what fp8 instructions of NVIDIA's GPUs multiply


@dataclass(frozen=True)
class LinearShape:
    """A linear layer, or the head.

    Attributes:
        inputs, outputs: number of features.
        count: number of layers that are stored together under this path.
        fp8: how its products are quantized; None for not at all.
    """

    inputs: int
    outputs: int
    count: int
    fp8: Fp8 | None


@choice(SurgeryConfig, "fp8")
class Fp8Config(SurgeryConfig):
    """Computes the matrix products of large linear layers in fp8 in training. Parameters, optimizer state, checkpoints and
    exports stay as they are, and evaluations and generation multiply in the compute dtype. Embeddings, routers, experts and
    attention scores stay in the compute dtype too. data.type: rollouts refuses it: its sampler would be another model.

    Attributes:
        recipe: `tensorwise` has one scale per array. `rowwise` has one per row, which is more accurate and slower.
        exclude: regular expression searched for in the paths of linear layers; matching layers stay in the compute dtype. The
            head is called `head`, also if it is tied to the embedding. Null excludes none.
        min_features: layers with fewer input or output features stay in the compute dtype, and so do layers whose numbers of
            features are not divisible by 16.
    """

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    exclude: str | None = None
    min_features: PositiveInt = 128

    def apply(self, model: LanguageModel, *, key: jax.Array) -> LanguageModel:
        layers = linear_layers(model)
        chosen = self._chosen(model)
        if not chosen:
            sizes = ", ".join(f"{path} {shape.inputs} x {shape.outputs}" for path, shape in list(layers.items())[:8])
            raise ConfigError(
                f"surgery fp8: no linear layer has at least min_features: {self.min_features} input and output features, each"
                f" divisible by {_MULTIPLE}, and is not excluded. The model has: {sizes or 'no linear layers of jaxlm'}."
                " Remove the surgery, or lower min_features"
            )
        already = [path for path in chosen if layers[path].fp8 is not None]
        if already:
            raise ConfigError(
                f"surgery fp8: {already[0]} is already computed in fp8 by an earlier surgery. Exclude it here or there"
            )
        return _with_fp8(model, chosen, Fp8(self.recipe))

    def merge(self, model: LanguageModel) -> LanguageModel:
        return _with_fp8(model, self._chosen(model), None)

    @property
    def wants(self) -> Wants:
        # Otherwise XLA compiles and measures many Triton kernels for each product: minutes instead of 44 s (docs/log.md).
        return Wants(compiler_options={"gpu": {"xla_gpu_enable_triton_gemm": False}})

    def _chosen(self, model: LanguageModel) -> list[str]:
        """The paths of the layers whose products this surgery computes in fp8."""
        layers = linear_layers(model)
        excluded = []
        if self.exclude is not None:
            pattern = tree.compile_pattern(self.exclude, "surgery fp8: exclude")
            excluded = [path for path in layers if pattern.search(path)]
            if not excluded:
                raise ConfigError(
                    f"surgery fp8: exclude: '{self.exclude}' matches no linear layer."
                    f" {tree.closest_paths(self.exclude, list(layers))}"
                )
        return [path for path, shape in layers.items() if path not in excluded and self._suits(shape)]

    def _suits(self, shape: LinearShape) -> bool:
        sizes = shape.inputs, shape.outputs
        return min(sizes) >= self.min_features and not any(size % _MULTIPLE for size in sizes)


def linear_layers(model: LanguageModel) -> dict[str, LinearShape]:
    """The linear layers with floating-point weights by path, without routers and experts; and the head, as `head`."""
    layers = {}
    for path, layer in tree.modules_by_path(model, Linear):
        outputs = axes_of(layer.Out)
        names = {axis.name for axis in outputs}
        if isinstance(layer.weight, NamedArray) and not names & {ROUTES, VOCAB}:
            inputs = axes_of(layer.In)
            stacked = [axis for axis in layer.weight.axes if axis not in (*inputs, *outputs)]
            layers[path] = LinearShape(hax.axis_size(inputs), hax.axis_size(outputs), hax.axis_size(stacked), layer.fp8)
    head = jax.eval_shape(lambda model: model.lm_head(), model)
    if isinstance(head, NamedArray):
        vocab = head.axis_size(VOCAB)
        layers[HEAD] = LinearShape(hax.axis_size(head.axes) // vocab, vocab, 1, model.traits.head_fp8)
    return layers


def describe_products(model: LanguageModel) -> str | None:
    """Says how many linear layers are computed in fp8, and with which recipe; None if there are none."""
    if model.traits.head_fp8 is None and all(layer.fp8 is None for layer in tree.modules(model, Linear)):
        return None
    counts: Counter[str | None] = Counter()
    for shape in linear_layers(model).values():
        counts[None if shape.fp8 is None else shape.fp8.recipe] += shape.count
    parts = [f"{count} linear layers in fp8 ({recipe})" for recipe, count in counts.items() if recipe is not None]
    return ", ".join([*parts, f"{counts[None]} in the compute dtype"]) if parts else None


def _with_fp8(model: LanguageModel, paths: Sequence[str], fp8: Fp8 | None) -> LanguageModel:
    body = [re.escape(path) for path in paths if path != HEAD]
    if body:
        changed = lambda layer: dataclasses.replace(layer, fp8=fp8)  # noqa: E731
        model = tree.map_modules(model, Linear, f"^({'|'.join(body)})$", changed)
    return with_traits(model, head_fp8=fp8) if HEAD in paths else model
