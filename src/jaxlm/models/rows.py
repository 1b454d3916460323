"""The rows of a model in the table of a plan: its size, attention, layers, positions and loss."""

import dataclasses
from collections.abc import Iterator

import jax

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, EMBED, EXPERTS, MLP, POSITION, axis_names
from jaxlm.core.devices import cuda_capability
from jaxlm.core.precision import Precision
from jaxlm.core.sharding import Layout
from jaxlm.models.attention.choose import AttentionTask
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.models.experts.grouped_products import choose_products
from jaxlm.models.layers import activation_dtype
from jaxlm.models.mixers.attention import Attention
from jaxlm.models.moe import Experts, num_active
from jaxlm.models.remat import describe_remat, parse_remat
from jaxlm.models.scan import runs_as_scan
from jaxlm.models.stacks import HeterogeneousBody, Stack


def model_rows(
    config: ModelConfig, model: LanguageModel, vocab_size: int, layout: Layout, chunk_tokens: int
) -> Iterator[tuple[str, str]]:
    """What a model is and how a step computes it.

    Args:
        model: with shapes for arrays.
        chunk_tokens: tokens for which the loss computes logits at a time.
    """
    family, seq_len = type(config).__name__.removesuffix("Config"), config.seq_len
    yield "model", f"{family}, {parameters(model)}, vocabulary {vocab_size:,}"
    for length in model.traits.switch_lengths:
        short = f"because no row is longer than {length:,} tokens"
        long = f"for a document of up to {length:,} tokens, long ones for a longer document"
        yield "positions", f"LongRoPE: short factors{f', {short}' if seq_len <= length else f' {long}'}"
    logits = "gradient computed in the forward pass, so logits are never materialized in full"
    if jax.eval_shape(lambda model: model.lm_head(), model) is None:
        logits = "from logits that the model materializes in full"
    yield "loss", f"chunks of {chunk_tokens} tokens, {logits}"
    policy = parse_remat(config.gradient_checkpointing)
    yield "remat", describe_remat(policy, layout.platform)
    stacks, layers = stacks_of(model), "defined by the model"
    if stacks:
        count, scan = sum(stack.Layers.size for stack in stacks), config.scan_layers
        loop, reason = runs_as_scan(scan, count, policy, platform=layout.platform, num_devices=layout.mesh.size)
        layers = f"{'one compiled layer in a scan' if loop else 'compiled separately'} ({reason})"
    yield "layers", layers


def parameters(model: LanguageModel) -> str:
    """The number of parameters and, if it differs, the number active per token."""
    count, active = tree.num_parameters(model), num_active(model)
    return f"{count:,} parameters" + (f" ({active:,} active per token)" if active < count else "")


def stacks_of(model: LanguageModel) -> list[Stack | HeterogeneousBody]:
    """The stacks of layers of a model, in no particular order."""
    return [*tree.modules(model, Stack), *tree.modules(model, HeterogeneousBody)]


def attention_tasks(
    config: ModelConfig, model: LanguageModel, layout: Layout, precision: Precision
) -> list[AttentionTask]:
    """What the layers of a model ask of an attention backend in a training step. Args: model: with shapes for arrays."""
    dtype = activation_dtype(jax.eval_shape(precision.cast_to_compute, model))
    shared = (layout.platform, cuda_capability(layout.device), dtype, config.seq_len)
    context = {"context": layout.context, "in_text_order": layout.context.balance == "none"}
    return [
        dataclasses.replace(layer.task(*shared, kind.window), **context)
        for stack in stacks_of(model)
        for layer in tree.modules(stack, Attention)
        for kind in stack.kinds
    ]


def expert_rows(model: LanguageModel, layout: Layout, precision: Precision) -> Iterator[tuple[str, str]]:
    """How devices exchange the tokens of experts, and how they multiply, one row for each way. Args: model: with shapes."""
    choices: dict[tuple[str, ...], None] = {}
    of_batch, of_row, of_experts = ({*axis_names(layout.compute.get(a, ()))} for a in (BATCH, POSITION, EXPERTS))
    is_exchanged = any(layout.mesh.shape[name] > 1 for name in of_experts & (of_batch | of_row))
    model = jax.eval_shape(precision.cast_to_compute, model)
    for experts in tree.modules(model, Experts):
        weight = experts.gate_proj.weight
        shape = [weight.axis_size(name) // layout.num_shards(name) for name in (EXPERTS, EMBED, MLP)]
        with layout.use():
            name, reason = choose_products(activation_dtype(model), weight, shape, experts.expert_products)
        exchange, limit = experts.expert_dispatch, "no choice is dropped"
        if not is_exchanged:
            exchange = "none, because no devices share both tokens and experts"
        if experts.expert_capacity is not None:
            limit = f"choices beyond {experts.expert_capacity:g} times even loads are dropped; which ones depends on the mesh"
        choices[f"{exchange}: {limit}", f"{name}: {reason}"] = None
    for exchange, products in choices:
        yield "dispatch of tokens", exchange
        yield "products of experts", products
