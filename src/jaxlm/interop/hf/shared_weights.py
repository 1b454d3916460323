"""Entries of the weight tables that several model families share."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from jaxlm.interop.hf.weights import Tensor, fused, single
from jaxlm.models.stacks import numbers_by_stack

BLOCK = "body.layers.stacked."
"""Path prefix of the parameters of all layers."""
HEADS = {"q_proj": "heads head_size", "k_proj": "kv_heads head_size", "v_proj": "kv_heads head_size"}
"""Output axes of the query, key and value projections."""


def embeddings_and_head(config: Any, *, final_norm: bool = True) -> Iterator[Tensor]:
    """Embedding, final norm and head, with Llama's names. Args: final_norm: whether the final norm has a weight."""
    yield single("model.embed_tokens.weight", "tokens.weight", "vocab | embed")
    if final_norm:
        yield single("model.norm.weight", "body.final_norm.weight", "embed")
    if not config.tie_word_embeddings:
        yield single("lm_head.weight", "head.weight", "vocab | embed")


def biased_attention(config: Any) -> Iterator[Tensor]:
    """`attention`, with biases on all projections if `attention_bias` is set."""
    return attention(qkv_bias=config.attention_bias, out_bias=config.attention_bias)


def attention(*, qkv_bias: bool = False, out_bias: bool = False) -> Iterator[Tensor]:
    """Query, key, value and output projections as separate tensors."""
    layer = "model.layers.{layer}.self_attn."
    for name, out in HEADS.items():
        yield single(f"{layer}{name}.weight", f"{BLOCK}attn.{name}.weight", f"{out} | embed")
        if qkv_bias:
            yield single(f"{layer}{name}.bias", f"{BLOCK}attn.{name}.bias", out)
    yield single(f"{layer}o_proj.weight", f"{BLOCK}attn.o_proj.weight", "embed | heads head_size")
    if out_bias:
        yield single(f"{layer}o_proj.bias", f"{BLOCK}attn.o_proj.bias", "embed")


def qk_norms(q: str = "head_size", k: str = "head_size") -> Iterator[Tensor]:
    """Query and key norms over these axes: by default over each head."""
    for name, axes in (("q_norm", q), ("k_norm", k)):
        yield single(f"model.layers.{{layer}}.self_attn.{name}.weight", f"{BLOCK}attn.{name}.weight", axes)


def gated_mlp(
    *, use_bias: bool = False, theirs: str = "mlp", ours: str = "mlp", features: str = "mlp"
) -> Iterator[Tensor]:
    """Gate, up and down projections.

    Args:
        theirs, ours: names of the MLP in a block.
        features: axis of its hidden features.
    """
    inwards = (("gate_proj", features, "embed"), ("up_proj", features, "embed"))
    for name, out, into in (*inwards, ("down_proj", "embed", features)):
        names = f"model.layers.{{layer}}.{theirs}.{name}", f"{BLOCK}{ours}.{name}"
        yield single(f"{names[0]}.weight", f"{names[1]}.weight", f"{out} | {into}")
        if use_bias:
            yield single(f"{names[0]}.bias", f"{names[1]}.bias", out)


def fused_gated_mlp() -> Iterator[Tensor]:
    """Gate and up projections as one matrix, and the down projection."""
    layer = "model.layers.{layer}.mlp."
    gate_up = {f"{BLOCK}mlp.{name}.weight": "mlp | embed" for name in ("gate_proj", "up_proj")}
    yield fused(f"{layer}gate_up_proj.weight", gate_up)
    yield single(f"{layer}down_proj.weight", f"{BLOCK}mlp.down_proj.weight", "embed | mlp")


def experts(module: str, *, gate: str, up: str, down: str) -> Iterator[Tensor]:
    """A router and its experts.

    Args:
        module: name of the MoE module in a layer.
        gate, up, down: names of an expert's projections.
    """
    layer = f"model.layers.{{layer}}.{module}."
    yield single(f"{layer}gate.weight", f"{BLOCK}mlp.router.weight", "routes | embed")
    for theirs, ours, layout in (
        (gate, "gate", "mlp | embed"),
        (up, "up", "mlp | embed"),
        (down, "down", "embed | mlp"),
    ):
        yield single(f"{layer}experts.{{expert}}.{theirs}.weight", f"{BLOCK}mlp.{ours}_proj.weight", layout)


def rows_by_stack(
    config: Any, others: Iterable[Tensor], *, experts: Iterable[Tensor], dense: Iterable[Tensor]
) -> Iterator[Tensor]:
    """The table of a family with experts, some of whose layers may be dense.

    Args:
        others: rows outside the layers.
        experts, dense: rows of the layers with experts, and of the dense ones, as if the model had one stack of them.
    """
    stacks = numbers_by_stack(config.order)
    for tensor in others:
        yield _in_stack(tensor, len(stacks) - 1, None) if len(stacks) > 1 else tensor
    for number, layers in enumerate(stacks):
        for tensor in dense if layers[0] in config.dense_layers else experts:
            yield _in_stack(tensor, number, layers) if len(stacks) > 1 else tensor


def _in_stack(tensor: Tensor, number: int, layers: tuple[int, ...] | None) -> Tensor:
    """A row whose parameters in the body are those of one of several stacks."""
    body, stack = "body.", f"body.{number}."
    parts = (
        replace(part, path=stack + part.path.removeprefix(body)) if part.path.startswith(body) else part
        for part in tensor.parts
    )
    return replace(tensor, parts=tuple(parts), numbers=layers)


def block_norms(**names: str) -> Iterator[Tensor]:
    """Norms of a block, as name in jaxlm=name in the files."""
    for ours, theirs in names.items():
        yield single(f"model.layers.{{layer}}.{theirs}.weight", f"{BLOCK}{ours}.weight", "embed")


def pre_norms() -> Iterator[Tensor]:
    """The two norms of Llama's blocks."""
    return block_norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")


def sandwich_norms() -> Iterator[Tensor]:
    """The four norms of Gemma's blocks: before and after attention and MLP."""
    return block_norms(
        attn_norm="input_layernorm",
        attn_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )


def usual_tensors(config: Any) -> Iterator[Tensor]:
    """The weights of many families: norms before attention and MLP, which may have biases."""
    yield from embeddings_and_head(config)
    yield from pre_norms()
    yield from biased_attention(config)
    yield from gated_mlp(use_bias=getattr(config, "mlp_bias", False))
