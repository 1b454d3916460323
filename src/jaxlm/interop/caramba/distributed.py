"""`distributed_strategy` of a run, and the keys of `DistributedConfig`, as keys of jaxlm's mesh.

Every strategy computes the same numbers. They differ in what a device holds: DDP all parameters, FULL_SHARD its share of
them, of the gradients and of the optimizer's state. SHARD_GRAD_OP keeps gathered parameters from the forward to the
backward pass; XLA decides that anew for each program, so it is FULL_SHARD here.
"""

from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

_SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_TORCH_ONLY = {
    "ddp_find_unused_parameters": "gradients are functions of all parameters; those without an effect are zero",
    "ddp_gradient_as_bucket_view": "XLA places the gradients",
    "ddp_static_graph": "the step is compiled once, so its graph is static",
    "ddp_broadcast_buffers": "models have no buffers",
    "fsdp_transformer_layer_cls": "parameters are sharded along the axis trainer.fsdp_axis, not by module",
    "fsdp_min_num_params": "parameters are sharded along the axis trainer.fsdp_axis, not by module",
    "fsdp_auto_wrap_policy": "parameters are sharded along the axis trainer.fsdp_axis, not by module",
    "fsdp_backward_prefetch": "XLA overlaps communication and computation",
    "fsdp_forward_prefetch": "XLA overlaps communication and computation",
    "fsdp_use_orig_params": "parameters are always the model's own",
    "fsdp_sync_module_states": "all processes make the same parameters from the seed",
    "distributed_backend": "JAX chooses how devices communicate",
    "backend": "JAX chooses how devices communicate",
    "init_method": "trainer.distributed says how processes meet",
}


def strategy_keys(train: Section, out: Translated) -> bool:
    """Writes the mesh of a run's `train` section, which may also have a section `distributed`: the keys of a
    `DistributedConfig`.

    Returns:
        Whether the computation is in bfloat16 (`fsdp_mixed_precision`).
    """
    strategy = train.choice("distributed_strategy", ("none", "ddp", "fsdp"))
    train.ignore("distributed_backend", _TORCH_ONLY["distributed_backend"])
    if strategy is not None:
        _put(train, "distributed_strategy", strategy, "FULL_SHARD", out)
    return "distributed" in train and _distributed(train.section("distributed"), out)


def _distributed(config: Section, out: Translated) -> bool:
    strategy = str(config.take("strategy", "ddp")).lower().removeprefix("distributedstrategy.")
    if strategy not in ("none", "ddp", "fsdp"):
        raise config.error("strategy", f"{strategy!r} given. Allowed: none, ddp, fsdp")
    sharding = config.choice("fsdp_sharding_strategy", _SHARDED, "FULL_SHARD")
    _put(config, "strategy", strategy, sharding, out)
    mixed = config.choice("fsdp_mixed_precision", (True, False), False)
    if config.choice("fsdp_activation_checkpointing", (True, False)) and strategy == "fsdp":
        out.put("model.gradient_checkpointing", "full", config, "fsdp_activation_checkpointing")
    config.refuse("fsdp_cpu_offload", "parameters are on the devices. Use more of them: they are sharded")
    for key, reason in _TORCH_ONLY.items():
        config.ignore(key, reason)
    config.done()
    return mixed and strategy == "fsdp"


def _put(section: Section, key: str, strategy: str, sharding: str, out: Translated) -> None:
    if strategy == "ddp" or (strategy == "fsdp" and sharding == "NO_SHARD"):
        out.put("trainer.fsdp_axis", None, section, key)
    elif strategy == "fsdp":
        out.put("trainer.fsdp_axis", "embed", section, key)
        if sharding == "SHARD_GRAD_OP":
            section.note(key, "SHARD_GRAD_OP is read as FULL_SHARD: XLA decides what stays gathered")
        if sharding == "HYBRID_SHARD":  # sharded within a machine, replicated across machines
            out.put("trainer.mesh", {"axes": {"data": -1}, "dcn_axes": {"replica": -1}}, section, key)
    if strategy != "none":
        section.note(key, "batch_size is that of all devices together, whatever their number")
