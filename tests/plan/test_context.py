"""trainer.context: which method and order of tokens it means, on which devices, and what is refused."""

import dataclasses
from typing import Any

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.mesh import AxisMappings, make_layout, mesh_shape
from jaxlm.core.sharding import AttentionWork, ContextSharding
from jaxlm.hardware.topologies import chip_of
from jaxlm.plan.context.choice import Devices, Rows, choose_balance, choose_method, hidden_from
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import Plan, make_plan
from jaxlm.plan.rows import attention_choices
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.startup import check_performance, describe

H100 = {"memory": 80e9, "attention": 425e12}
NVLINK, NETWORK = 360e9, 50e9
# Llama 8B: 32 query heads and 8 key/value heads of 128.
LLAMA = {"heads": 32, "kv_heads": 8, "kv_features": 8 * 2 * 128}
K = 1024


def rows(seq_len: int = 128 * K, tensor: int = 1, **changes: Any) -> Rows:
    """Args: tensor: devices that divide the heads (tensor parallelism)."""
    heads = {name: value // tensor for name, value in LLAMA.items()}
    return Rows(**{"seq_lens": (seq_len,), **heads, **changes})


def devices(size: int, near: int | None = None, **changes: Any) -> Devices:
    near = size if near is None else near
    return Devices(size, near, **{**H100, "bandwidth": NVLINK if near == size else NETWORK, **changes})


# Devices, rows -> method, devices that exchange heads, and a part of the reason.
CHOSEN = {
    "one node": (devices(8), rows(), ("ulysses", 8, "8 key/value heads divide over 8 devices of one node")),
    "a million tokens": (devices(8), rows(K * K), ("ulysses", 8, "")),
    "half of the heads": (devices(8), rows(tensor=2), ("gather", 1, "4 key/value heads do not divide over 8 devices")),
    # 12 g H T = 12 x 4 x 128 x 1M bytes are 6.4 GB of 80; of 2M, 12.9.
    "just fits": (devices(8), rows(K * K, tensor=2), ("gather", 1, "take 6.44 GB of 80")),
    "too large": (devices(8), rows(2 * K * K, tensor=2), ("usp", 4, "take 12.9 GB, more than a tenth of the memory")),
    "a single head": (devices(8), rows(8 * K * K, heads=8, kv_heads=1, kv_features=256), ("ring", 1, "")),
    "several nodes": (devices(16, 8), rows(), ("gather", 1, "8 key/value heads do not divide over 16 devices")),
    "the heads divide over several nodes": (devices(8, 4), rows(), ("gather", 1, "in several nodes")),
    "a ring of nodes": (devices(16, 8), rows(2 * K * K), ("usp", 8, "")),
    "groups in nodes of 4": (devices(16, 4), rows(2 * K * K), ("usp", 4, "")),
    "links that attention waits for": (
        devices(8, 1, memory=1e9),
        rows(8 * 4 * K),
        ("gather", 1, "a ring with 4,096 tokens a shard would wait for its links (below 4,250)"),
    ),
    "links that attention hides": (devices(8, 1, memory=1e9), rows(8 * 5 * K), ("ring", 1, "")),
    "CPUs of one process": (Devices(8, 8), rows(), ("ulysses", 8, "")),
    "CPUs of several processes": (Devices(8, 4), rows(8 * K * K), ("gather", 1, "")),
    "little memory and no bandwidth": (Devices(8, 4, memory=1e9), rows(), ("usp", 4, "")),
    "fused kernels for whole rows": (
        devices(8, fused="rows"),
        rows(tensor=2),
        ("ulysses", 8, "4 key/value heads are repeated"),
    ),
    "fused kernels for rings": (devices(64, 8, fused="zigzag"), rows(), ("usp", 8, "take the parts of a ring")),
    "no heads to exchange": (devices(8, 1, fused="zigzag"), rows(), ("ring", 1, "")),
    "attention of its own": (devices(8), rows(heads=0, kv_heads=0), ("gather", 1, "computes attention by itself")),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_method_follows_from_heads_nodes_memory_and_links(case):
    where, what, (method, heads_size, reason) = CHOSEN[case]
    groups = [size for size in range(2, where.size) if where.size % size == 0]
    found = choose_method(what, where, groups)
    assert found[:2] == (method, heads_size)
    assert reason in found[2]


def test_a_mesh_of_ones_own_has_one_size_of_groups():
    assert choose_method(rows(2 * K * K), devices(16, 8), [4])[:2] == ("usp", 4)
    assert choose_method(rows(2 * K * K), devices(16, 8), [])[:2] == ("ring", 1)


def test_the_tokens_from_which_a_hop_is_hidden():
    """Of the specification: g / h = 1/4 at 425 TFLOP/s."""
    assert hidden_from(rows(), devices(8, 1)) == pytest.approx(4250)
    assert hidden_from(rows(), devices(8)) == pytest.approx(590, abs=1)
    assert hidden_from(rows(), Devices(8, 8)) is None


WINDOWS = AttentionWork(((1024, 32),))
BALANCED = {
    "one document": (rows(), 8, "zigzag", "each row has one document"),
    "packed": (rows(is_packed=True), 8, "blocks", "several documents"),
    "whole rows": (rows(is_packed=True), 1, "none", "whole rows"),
    "windows alone": (rows(is_packed=True, work=WINDOWS), 8, "none", "windows"),
    "windows and others": (rows(work=AttentionWork(((1024, 20), (None, 4)))), 8, "zigzag", ""),
    "a window as long as a row": (rows(1024, work=WINDOWS), 8, "zigzag", ""),
    "both ways": (rows(work=AttentionWork(causal=False)), 8, "none", "attend to later ones"),
    "both ways, packed": (rows(work=AttentionWork(causal=False), is_packed=True), 8, "blocks", ""),
    "no blocks": (rows(8 * 136, is_packed=True), 8, "zigzag", "not blocks: model.seq_len (1088)"),
    "no chunks": (rows(8 * 135), 8, "none", "not zigzag: model.seq_len (1080)"),
    "recurrent layers": (rows(is_packed=True, consecutive="of states"), 8, "zigzag", "not blocks: of states"),
    "a fixed order": (rows(fixed_order="of my own"), 8, "none", "of my own"),
}


@pytest.mark.parametrize("case", BALANCED)
def test_the_order_follows_from_documents_and_windows(case):
    what, num_shards, balance, reason = BALANCED[case]
    found = choose_balance(what, num_shards)
    assert found[0] == balance
    assert reason in found[1]


def test_fused_kernels_decide_on_the_order():
    assert choose_balance(rows(is_packed=True), 8, fused_zigzag=True) == ("zigzag", "fused kernels need it")
    both_ways = rows(work=AttentionWork(causal=False), is_packed=True)
    assert choose_balance(both_ways, 8, fused_zigzag=True)[0] == "blocks"


MODEL = {"type": "llama", "seq_len": 64, "hidden_dim": 32, "num_layers": 2, "num_heads": 8, "intermediate_dim": 32}
FLAX = {"type": "flax", "seq_len": 64, "factory": "examples.nnx_model:make", "kwargs": {"width": 32, "depth": 1}}
TENSOR = {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]}


def plan_of(model: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **trainer: Any) -> Plan:
    model = model if model and model.get("type") == "flax" else {**MODEL, "num_kv_heads": 2, **(model or {})}
    tree = {"model": model, "trainer": {"train_batch_size": 16, **trainer}, "optimizer": optimizer or {}}
    return make_plan(decode_run(ConfigSource(tree), None), "x", 64)


def custom(*axes: str, **context: Any) -> dict[str, Any]:
    """A mesh with axes of these names, of 2 devices and then 4, that share rows."""
    sizes = dict(zip(axes, (2, 4)[-len(axes) :], strict=True))
    return {"mesh": {"axes": {"data": -1, **sizes}, "compute_mapping": {"position": list(axes)}}, "context": context}


PLANNED = {
    "gather": ({"context": {"size": 8}}, {"context": 8}, ContextSharding(gather=("context",), balance="blocks")),
    "ulysses": ({"context": {"size": 2}}, {"data": 4, "context": 2}, ContextSharding(heads=("context",))),
    "ring": (
        {"context": {"size": 4, "method": "ring", "balance": "zigzag"}},
        {"data": 2, "context": 4},
        ContextSharding(ring=("context",), balance="zigzag"),
    ),
    "usp": (
        {"context": {"size": 8, "method": "usp", "balance": "none"}},
        {"context": 4, "context_heads": 2},
        ContextSharding(ring=("context",), heads=("context_heads",)),
    ),
    "usp in groups of 4": (
        {"context": {"size": 8, "method": "usp", "heads_size": 4}},
        {"context": 2, "context_heads": 4},
        ContextSharding(ring=("context",), heads=("context_heads",), balance="blocks"),
    ),
    "beside tensor parallelism": (
        {"context": {"size": 4}, **TENSOR},
        {"context": 4, "model": 2},
        ContextSharding(gather=("context",), balance="blocks"),
    ),
    "a mesh of one's own": (
        custom("mine"),
        {"data": 2, "mine": 4},
        ContextSharding(gather=("mine",), balance="blocks"),
    ),
    "usp on a mesh of one's own": (
        custom("outer", "inner", method="usp"),
        {"outer": 2, "inner": 4},
        ContextSharding(ring=("outer",), heads=("inner",), balance="blocks"),
    ),
}


@pytest.mark.parametrize("case", PLANNED)
def test_the_mesh_and_what_moves_along_its_axes(case):
    trainer, sizes, sharding = PLANNED[case]
    plan = plan_of(**trainer)
    layout = plan.layout
    assert {axis: size for axis, size in layout.mesh.shape.items() if size > 1} == sizes
    names = list(layout.mesh.axis_names)
    if "mesh" not in trainer:
        assert names.index("data") < names.index("context") < names.index("model"), "the fastest links are last"
    assert layout.context == dataclasses.replace(sharding, work=AttentionWork(((None, 2),)))
    assert layout.compute["position"] == sharding.axes
    assert layout.parameter["embed"] == ("data", *sharding.axes), "a context device would hold a copy of the parameters"
    assert layout.num_shards("position") == plan.context.size
    ((_, text),) = [row for row in describe(plan) if row[0] == "context"]
    assert text.startswith(plan.context.method)
    assert f"order of tokens {sharding.balance}" in text
    assert f"{64 // plan.context.size} tokens of a row on a device" in text


HYBRID = {"type": "qwen3_5", "num_layers": 4, "head_dim": 8, "state_key_dim": 8, "state_value_dim": 8}


@pytest.mark.parametrize(("heads", "balance"), [(2, "zigzag"), (8, "blocks")])
def test_recurrent_layers_need_consecutive_tokens_or_as_many_heads(heads, balance):
    model = {**HYBRID, "num_state_heads": heads, "num_value_heads": heads}
    assert plan_of(model, context={"size": 8}).layout.context.balance == balance
    beside_tensor = plan_of(model, context={"size": 4}, **TENSOR)
    assert beside_tensor.layout.compute["state_heads"] == "model"
    assert beside_tensor.layout.context.balance == balance


def test_one_device_for_a_row_changes_nothing():
    for context in ({}, {"size": 1}):
        plan = plan_of(context=context)
        assert plan.context is None
        assert dict(plan.layout.mesh.shape) == {"replica": 1, "data": 8, "model": 1}
        assert plan.layout.parameter["embed"] == "data"
        assert "position" not in plan.layout.compute
        assert not [row for row in describe(plan) if row[0] == "context"]


REFUSED = {
    "devices": ({"context": {"size": 3}}, r"context\.size: 3 given, .* the 8 devices .* Allowed: 1, 2, 4, 8"),
    "tokens": (
        {"model": {"seq_len": 60}, "context": {"size": 8}},
        "context: 8 devices .*seq_len: 60 .* a multiple of 8",
    ),
    "chunks": (
        {"model": {"seq_len": 24}, "context": {"size": 8, "balance": "zigzag"}},
        r"balance: zigzag given, but model.seq_len \(24\) .* two chunks .* multiple of 16",
    ),
    "blocks": (
        {"model": {"seq_len": 1088}, "context": {"size": 8, "balance": "blocks"}},
        r"balance: blocks given, but model.seq_len \(1088\) .* blocks of 16 tokens .* multiple of 128",
    ),
    "query heads": (
        {"model": {"num_heads": 4}, "context": {"size": 8, "method": "ulysses"}},
        "phase 'train'.*method: 8 devices .* 4 query heads .* do not divide",
    ),
    "query heads after tensor parallelism": (
        {"model": {"num_heads": 4}, "context": {"size": 4, "method": "ulysses"}, **TENSOR},
        "method: 4 devices .* 2 query heads on a device",
    ),
    "heads of a group": (
        {"model": {"num_heads": 2}, "context": {"size": 8, "method": "usp", "heads_size": 4}},
        "4 devices exchange tokens .* 2 query heads .* a heads_size",
    ),
    "whole rows": (
        {"context": {"size": 2, "balance": "zigzag"}},
        "balance: zigzag given, but with method: ulysses each device computes whole rows",
    ),
    "a method for one device": (
        {"context": {"method": "ring"}},
        "method: ring given, but no devices share .*size to 2",
    ),
    "an order for one device": (
        {"context": {"size": 1, "balance": "blocks"}},
        "balance: blocks given, but no devices share",
    ),
    "heads_size of another method": (
        {"context": {"size": 4, "heads_size": 2}},
        "heads_size: 2 given without method: usp, but method is auto",
    ),
    "heads_size that does not divide": (
        {"context": {"size": 8, "method": "usp", "heads_size": 3}},
        "heads_size: 3 given, one of 2, 4 expected",
    ),
    "one group": ({"context": {"size": 2, "method": "usp"}}, "method: usp given, which needs groups of devices"),
    "two sizes": (custom("mine", size=4), "size: 4 given together with mesh, which sets the sizes of all axes"),
    "heads_size of a mesh": (
        custom("outer", "inner", method="usp", heads_size=4),
        "heads_size: 4 given, but the last axis that trainer.mesh maps position to",
    ),
    "one axis for two": (custom("mine", method="usp"), "usp given, .* map position to two mesh axes"),
    "a mesh without the axis": (
        {"mesh": {}, "context": {"size": 4}},
        "size: 4 given together with mesh, which sets the sizes of all axes",
    ),
    "mapped elsewhere": (
        {"context": {"size": 2}, "compute_axis_resources": {"position": "model"}},
        "size: 2 given, but position is mapped to model",
    ),
    "a chunk for each of both directions": (
        {"model": {"use_bidirectional_attention": True}, "context": {"size": 8, "balance": "zigzag"}},
        "balance: zigzag given, but tokens attend to later ones",
    ),
    "Flax, in another order": (
        {"model": FLAX, "context": {"size": 8, "balance": "zigzag"}},
        "balance: zigzag given, but a model of type FlaxModel computes attention by the index",
    ),
    "Flax, in a ring": (
        {"model": FLAX, "context": {"size": 8, "method": "ring"}},
        "method: ring given, but a model of type FlaxModel .* auto or gather",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_its_key(case):
    trainer, named = REFUSED[case]
    with pytest.raises(ConfigError, match=named):
        plan_of(**trainer)


def test_a_flax_model_gathers_rows_in_the_order_of_the_text():
    plan = plan_of(FLAX, context={"size": 4})
    assert plan.layout.context == ContextSharding(gather=("context",))
    assert plan.context.moved == 0, "which its compiler knows"


def test_attention_that_no_kernel_divides_is_a_fallback():
    """Dropout of weights, and second derivatives, need all scores at once where devices have a part of the keys."""

    def names(**sections: Any) -> list[tuple[str, bool]]:
        return [(choice.name, choice.degraded) for choice in attention_choices(plan_of(**sections))]

    gpt2 = {"type": "gpt2", "seq_len": 64, "hidden_dim": 32, "num_layers": 2, "num_heads": 8}

    def checked(**sections: Any) -> None:
        tree = {"trainer": {"train_batch_size": 16, "strict_performance": True, **sections.pop("trainer")}, **sections}
        check_performance(make_plan(decode_run(ConfigSource(tree), None), "x", 64))

    shared = {"context": {"size": 8, "method": "ring"}}
    assert names(**shared) == [("blockwise", False)]
    sophia = {"type": "sophia-h"}
    assert names(optimizer=sophia, **shared) == [("blockwise", False), ("reference", True)]
    assert names(optimizer=sophia, context={"size": 2}) == [("blockwise", False)]
    checked(model=gpt2, trainer=shared)
    for model, optimizer in (({**gpt2, "attn_pdrop": 0.1}, {}), (gpt2, sophia)):
        with pytest.raises(ConfigError, match="strict_performance: attention uses the reference backend"):
            checked(model=model, optimizer=optimizer, trainer=shared)


@dataclasses.dataclass(frozen=True)
class Card:
    """A described device."""

    id: int
    device_kind: str
    process_index: int = 0
    platform: str = "gpu"


def test_neighbors_are_in_one_node_as_far_as_fast_links_reach():
    def near(kind: str, count: int, model: int = 1, per_process: int = 8) -> tuple[int, float | None]:
        cards = [Card(number, kind, number // per_process) for number in range(count)]
        layout = make_layout(
            mesh_shape(count, context={"context": count // model}, model=model),
            AxisMappings("batch", (), ("mlp",), {}, {}),
            {"mlp": 64},
            cards,
        )
        found = Devices.of(layout, ("context",), cards)
        return found.near, found.bandwidth

    assert near("NVIDIA H100 80GB HBM3", 8) == (8, 450e9)
    assert near("NVIDIA H100 80GB HBM3", 16) == (8, 50e9)
    assert near("NVIDIA H100 80GB HBM3", 16, model=2) == (4, 50e9)
    assert near("NVIDIA H100 80GB HBM3", 8, per_process=1) == (8, 450e9)
    assert near("TPU v5p", 16) == (16, 600e9)
    assert near("cpu", 8) == (8, None)
    assert near("cpu", 8, per_process=2) == (2, None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5", "v5p"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("TPU v4", "v4"),
        ("TPU v4 lite", None),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", None),
        ("cpu", None),
    ],
)
def test_the_chip_of_a_device(kind, name):
    chip = chip_of(kind)
    assert (chip and chip.name) == name
