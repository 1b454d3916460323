"""Rows of weight tables for the layer that predicts the token after the next one (`jaxlm.models.decoders.mtp`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxlm.interop.hf.family import has_mtp
from jaxlm.interop.hf.weights import BLOCK, Tensor, single
from jaxlm.models.decoders.mtp import MTP

_LAYER = "model.layers.{layer}."
_OWN = {"proj": "embed | mtp_input", "embed_norm": "embed", "hidden_norm": "embed", "final_norm": "embed"}


def qwen_mtp(config: Any, rows: Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows in Qwen's folders, which have it beside the model. Args: rows: of layers like it in the body."""
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return _rows(config, [f"mtp.{name}.weight" for name in names], rows, "mtp.layers.{layer}.", None)


def mtp_behind_layers(config: Any, rows: Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows in folders that have it as a layer behind the last one, like DeepSeek-V3. Arguments as of `qwen_mtp`."""
    names = [
        f"model.layers.{config.num_layers}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    ]
    return _rows(config, names, rows, _LAYER, (config.num_layers,))


COPIES_BEHIND_LAYERS = {
    f"{_LAYER}embed_tokens.weight": "model.embed_tokens.weight",
    f"{_LAYER}shared_head.head.weight": "lm_head.weight",
}
"""What such folders may also have (`Family.copies`)."""


def without_mtp(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The rows of the model in transformers, which does not have this layer."""
    return [tensor for tensor in tensors if not tensor.parts[0].path.startswith(f"{MTP}.")]


def _rows(
    config: Any, names: Sequence[str], rows: Iterable[Tensor], layer: str, numbers: tuple[int, ...] | None
) -> Iterator[Tensor]:
    if not has_mtp(config):
        return
    for name, (ours, layout) in zip(names, _OWN.items(), strict=True):
        yield single(name, f"{MTP}.{ours}.weight", layout)
    for row in rows:
        parts = (replace(p, path=p.path.replace(BLOCK, f"{MTP}.layers.stacked.", 1)) for p in row.parts)
        yield replace(row, name=row.name.replace(_LAYER, layer, 1), parts=tuple(parts), numbers=numbers)
