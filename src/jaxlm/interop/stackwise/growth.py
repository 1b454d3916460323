"""`training.progressive`, and what belongs to it in `training`, as the preset `progressive`."""

from dataclasses import dataclass

from jaxlm.interop.section import Section
from jaxlm.interop.stackwise.adapters import drop_adapters, put_adapters
from jaxlm.interop.stackwise.objective import Objective
from jaxlm.interop.translated import Translated

_MAX_STACKS = 12
_BLOCKS = 4
_PRECISIONS = {
    "full": "f32",
    "half": "p=f32,c=float16",
    "fp16": "p=f32,c=float16",
    "bfloat16": "p=f32,c=bfloat16",
    "qlora": None,
    "nvfp4": None,
}
"""`new_stack_precision` -> `trainer.mp`; None for those that say how a stack is stored once it is part of the trunk."""
_FOUR_BITS = {"qlora": "nf4", "nvfp4": "nvfp4"}
_QUANTIZED = {"fp4": "nvfp4", "fp16": "float16", "fp32": None}
_ONLY_GROWTH = ("enabled", "trunk_strategy", "cache_activations", "building_mode", "max_stacks", "target_stacks")
WHOLE = "no effect: all stacks train at once (strategy: end_to_end, or progressive.enabled: false)"


@dataclass(frozen=True)
class Growth:
    """How many stacks there are.

    Attributes:
        is_progressive: whether they train one after the other.
        num_stacks, num_blocks: stacks, and layers of each.
        stacks_from, blocks_from: section and key that say so.
        at: where new stacks go.
    """

    is_progressive: bool
    num_stacks: int
    num_blocks: int
    stacks_from: tuple[Section, str]
    blocks_from: tuple[Section, str]
    at: str = "append"

    @staticmethod
    def of(training: Section, progressive: Section, architecture: Section) -> "Growth":
        strategy = training.choice("strategy", ("progressive", "end_to_end"), "progressive")
        enabled = progressive.choice("enabled", (True, False), True)
        scope = training.choice("end_to_end_scope", ("stackwise", "rackwise"))
        blocks = architecture.number("blocks_per_stack", _BLOCKS)
        if strategy == "progressive" and scope is not None:
            training.note("end_to_end_scope", "no effect with strategy: progressive")
        elif scope == "stackwise":
            raise training.error(
                "end_to_end_scope",
                "'stackwise' given, which trains stacks one after the other. Set strategy: progressive, which does that, or"
                " end_to_end_scope: rackwise",
            )
        if strategy == "end_to_end" or not enabled:
            stacks = architecture.number("n_stacks", 2)
            return Growth(False, stacks, blocks, (architecture, "n_stacks"), (architecture, "blocks_per_stack"))
        most, target = progressive.number("max_stacks"), progressive.number("target_stacks")
        planned = architecture.number("n_stacks")
        where = (progressive, "target_stacks")
        if target is None:
            where = (progressive, "max_stacks") if most is not None else (architecture, "n_stacks")
            target = next(number for number in (most, planned, _MAX_STACKS) if number is not None)
        elif most is not None and target > most:
            raise progressive.error("target_stacks", f"{target} given, above max_stacks: {most}. Set one of them")
        if planned not in (None, target):
            architecture.note("n_stacks", f"no effect: {where[1]} says that {target} stacks train")
        at = progressive.choice("building_mode", ("append", "prepend"), "append")
        return Growth(True, target, blocks, where, (architecture, "blocks_per_stack"), at)


def put_growth(growth: Growth, training: Section, progressive: Section, objective: Objective, out: Translated) -> None:
    """Writes the preset, without its steps and times."""
    out.put("preset.type", "progressive", progressive, "enabled")
    out.put("preset.stacks", growth.num_stacks, *growth.stacks_from)
    out.put("model.num_layers", growth.num_blocks, *growth.blocks_from)
    out.put("preset.at", growth.at, progressive, "building_mode")
    trunk = progressive.choice("trunk_strategy", ("frozen", "qlora"), "frozen")
    out.put("preset.trunk", {"frozen": "frozen", "qlora": "lora"}[trunk], progressive, "trunk_strategy")
    _put_precision(training, progressive, trunk, out)
    put_adapters(training, progressive, trunk == "qlora", growth.num_stacks, out)
    _put_cache(progressive, growth.at, trunk, objective, out)


def drop_growth(growth: Growth, training: Section, progressive: Section, out: Translated) -> None:
    """Writes a model that trains as a whole, and takes the keys of growth."""
    out.put("model.num_layers", growth.num_stacks * growth.num_blocks, *growth.stacks_from)
    precision = progressive.choice("new_stack_precision", _PRECISIONS, "full")
    if precision in _FOUR_BITS:
        raise progressive.error(
            "new_stack_precision", f"'{precision}' given, but weights that train are not stored in 4 bits. Set bfloat16"
        )
    out.put("trainer.mp", _PRECISIONS[precision], progressive, "new_stack_precision")
    for key in _ONLY_GROWTH:
        progressive.ignore(key, WHOLE)
    for key in ("quantization_enabled", "quantization_type"):
        training.ignore(key, WHOLE)
    drop_adapters(training, progressive, WHOLE)


def _put_precision(training: Section, progressive: Section, trunk: str, out: Translated) -> None:
    key = "new_stack_precision"
    if progressive.peek(key) == "nf_fp8":
        raise progressive.error(
            key, "'nf_fp8' given, which jaxlm cannot do. Set qlora (4 bits), nvfp4, half or bfloat16"
        )
    precision = progressive.choice(key, _PRECISIONS, "full")
    out.put("trainer.mp", _PRECISIONS[precision] or "f32", progressive, key)
    if precision in _FOUR_BITS:
        progressive.note(
            key,
            f"{precision}: a stack trains in float32, and is stored as {_FOUR_BITS[precision]} once it is part of the trunk",
        )
    elif precision != "full":
        scaled = ", with a loss scale" if precision != "bfloat16" else ""
        progressive.note(key, f"{precision} is the dtype of the computation{scaled}; weights that train stay float32")
    enabled = training.choice("quantization_enabled", (True, False))
    if enabled is not False and training.peek("quantization_type") == "fp8":
        raise training.error(
            "quantization_type", "'fp8' given, but trunks are not stored in fp8. Set fp4, fp16 or fp32 (unchanged)"
        )
    kind = training.choice("quantization_type", (*_QUANTIZED, "fp8"))
    if enabled is False:
        if kind is not None:
            training.note("quantization_type", "no effect with quantization_enabled: false")
        if precision in _FOUR_BITS:
            raise training.error(
                "quantization_enabled",
                f"false given, but progressive.new_stack_precision: {precision} stores the trunk. Remove one of them",
            )
        kind = None
    elif enabled and kind is None:
        kind = "fp16"
    if kind is not None and precision in _FOUR_BITS and _QUANTIZED[kind] != _FOUR_BITS[precision]:
        raise training.error(
            "quantization_type",
            f"{kind} given, but progressive.new_stack_precision is {precision}: both say how the trunk is stored. Remove one",
        )
    if kind is not None:
        store, where, said = _QUANTIZED[kind], (training, "quantization_type"), f"quantization_type: {kind}"
        instead = "quantization_type: fp32"
    elif precision in _FOUR_BITS:
        store, where, said = _FOUR_BITS[precision], (progressive, key), f"progressive.{key}: {precision}"
        instead = f"progressive.{key}: full"
    else:
        store = "nf4" if trunk == "qlora" and enabled is None else None
        where, said = (progressive, "trunk_strategy"), f"progressive.trunk_strategy: {trunk}"
        instead = "quantization_enabled: false"
    if store is None:
        return
    if steps := training.peek("joint_tuning_steps"):
        raise training.error(
            "joint_tuning_steps",
            f"{steps} given, but {said} stores the trunk as {store}, and stored weights cannot be trained. Remove it, or set"
            f" {instead}",
        )
    out.put("preset.store", store, *where)


def _put_cache(progressive: Section, at: str, trunk: str, objective: Objective, out: Translated) -> None:
    is_given = progressive.peek("cache_activations") is not None
    if not progressive.choice("cache_activations", (True, False), True):
        return
    why = None
    if trunk == "qlora":
        why = "the adapters of a trunk with trunk_strategy: qlora change what it computes in every step"
    elif at == "prepend":
        why = "with building_mode: prepend, the trunk reads what the new stack computes, which changes in every step"
    if why is not None:
        if is_given:
            progressive.note("cache_activations", f"nothing is stored: {why}")
        return
    out.put("preset.cache", True, progressive, "cache_activations")
    if objective.hides_tokens:
        out.put("data.masking.mask_replicas", 1, progressive, "cache_activations")
        progressive.note(
            "cache_activations",
            "tokens of a sequence are hidden in one way in all epochs, so that what the trunk computes of it can be stored."
            " Set --data.masking.mask_replicas to have more ways, which take as many times the disk",
        )
