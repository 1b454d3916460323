"""Translates `training.progressive`, and what belongs to it in `training`, to the preset: growth and adapters.

The adapters of the trunk are `qlora_...` of `training.progressive`, or the section `training.qlora`. In StackWise a stack
has adapters of its own, and further ones when it becomes part of the trunk. Both train from then on and are added up, so
here they are one adapter, whose rank is the sum.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from jaxlm.compat.section import Section, Translated
from jaxlm.compat.stackwise.keys import LINEAR_PATTERNS, QLORA_KEYS, STRATEGIES, Objective, check_kinds
from jaxlm.core.errors import shown
from jaxlm.systems.progressive.patterns import ALPHA_STEP, RANK_STEP, Pattern, by_pattern

_OF_STACK = (
    "qlora_rank",
    "qlora_alpha",
    "qlora_strategy",
    "qlora_rank_pattern",
    "qlora_alpha_pattern",
    "qlora_configs",
)
_OF_TRUNK = ("progressive_qlora_rank", "progressive_qlora_alpha")
_KEYS = ("qlora_enabled", *_OF_STACK, "progressive_qlora", *_OF_TRUNK)
_SECTION = "qlora"
_FROZEN = (
    "no effect with trunk_strategy: frozen: adapters are frozen with the trunk, and a stack that trains needs none"
)
_NO_DROPOUT = "the adapters of the preset have none. Set it to 0, or write `phases` with the surgery lora"
_SIZE = ("rank", "alpha")
_CONSTANT = ["constant", "constant"]
Size = tuple[float, float]
"""Rank and alpha."""


def drop_adapters(training: Section, progressive: Section, why: str) -> None:
    """Takes the keys of adapters where there are none."""
    for key in _KEYS:
        progressive.ignore(key, why)
    if _SECTION in training:
        qlora = training.section(_SECTION)
        check_kinds([qlora])
        qlora.refuse("dropout", _NO_DROPOUT, 0, 0.0)
        for key in QLORA_KEYS:
            qlora.ignore(key, why)
        qlora.done()


def put_adapters(training: Section, progressive: Section, has_adapters: bool, num_stacks: int, out: Translated) -> None:
    """Writes `preset.lora`. Args: has_adapters: whether the trunk is one with adapters that train."""
    if not has_adapters:
        drop_adapters(training, progressive, _FROZEN)
        return
    if given := [key for key in _KEYS if key in progressive and _SECTION in training]:
        raise progressive.error(
            given[0], "given together with the section training.qlora, which says the same. Remove one"
        )
    number = num_stacks - 1  # of the stacks that become part of a trunk
    if _SECTION in training:
        _put_section(training, number, out)
    else:
        _put_keys(progressive, number, out)


def _put_keys(progressive: Section, number: int, out: Translated) -> None:
    of_stack = progressive.choice("qlora_enabled", (True, False), True)
    of_trunk = progressive.choice("progressive_qlora", (True, False), False)
    if not of_stack and not of_trunk:
        raise progressive.error(
            "qlora_enabled",
            "false given with trunk_strategy: qlora, but then nothing in the trunk trains. Set it to true, or trunk_strategy:"
            " frozen",
        )
    if not of_trunk:
        for key in _OF_TRUNK:
            progressive.ignore(key, "no effect without progressive_qlora: true")
    if not of_stack:
        for key in _OF_STACK:
            progressive.ignore(key, "no effect with qlora_enabled: false: the adapters are those of progressive_qlora")
    trunk_size = progressive.number("progressive_qlora_rank", 8), progressive.number("progressive_qlora_alpha", 16)
    if not of_stack:
        _put_simple(*trunk_size, _CONSTANT, progressive, "progressive_qlora", out)
        return
    strategy = progressive.choice("qlora_strategy", STRATEGIES, "simplified")
    rank, alpha, table = _sizes(progressive, "qlora_", strategy, number)
    patterns = _patterns(progressive, "qlora_", strategy, get_args(Pattern))
    if not of_trunk and table is None:
        _put_simple(rank, alpha, patterns, progressive, "qlora_rank", out)
    else:
        sizes = table or [_by_patterns(rank, alpha, patterns, stack) for stack in range(number)]
        if of_trunk:
            _note_sum(progressive, sizes, trunk_size)
            sizes = [(size[0] + trunk_size[0], size[1] + trunk_size[1]) for size in sizes]
        if len(set(sizes)) == 1:
            _put_simple(*sizes[0], _CONSTANT, progressive, "qlora_rank", out)
        else:
            _put_table(sizes, progressive, "qlora_strategy", out)


def _note_sum(progressive: Section, sizes: list[Size], trunk_size: Size) -> None:
    progressive.note(
        "progressive_qlora", "a stack of the trunk has one adapter, whose rank and alpha are the sums of both adapters'"
    )
    if any(alpha * trunk_size[0] != trunk_size[1] * rank for rank, alpha in sizes):
        progressive.note(
            "progressive_qlora_alpha", "the sum is scaled by its alpha / rank, which is between those of both"
        )


def _put_section(training: Section, number: int, out: Translated) -> None:
    """The section `training.qlora`. Its patterns are linear in the number of the stack, from `progressive_rank` to `rank`."""
    qlora = training.section(_SECTION)
    check_kinds([qlora])
    if not qlora.choice("enabled", (True, False), True):
        raise qlora.error("enabled", "false given with trunk_strategy: qlora, but then nothing in the trunk trains")
    strategy = qlora.choice("strategy", STRATEGIES, "simplified")
    rank, alpha, table = _sizes(qlora, "", strategy, number)
    patterns: dict[str, Any] = dict(zip(_SIZE, _patterns(qlora, "", strategy, LINEAR_PATTERNS), strict=True))
    for of, pattern in patterns.items():
        if pattern == "constant":
            qlora.ignore(
                f"progressive_{of}", f"no effect: all stacks have the same {of}, unless configs says otherwise"
            )
    last: dict[str, float] = {"rank": rank, "alpha": alpha}
    first: dict[str, float] = {
        "rank": qlora.number("progressive_rank", 8),
        "alpha": qlora.number("progressive_alpha", 16),
    }
    qlora.ignore("progressive_enabled", "no effect: strategy decides that")
    qlora.refuse("dropout", _NO_DROPOUT, 0, 0.0)
    qlora.ignore("lr", "no effect: adapters have the learning rate of the optimizer")
    qlora.ignore("mixed_precision", "no effect: preset.store says how the trunk is stored; adapters are float32")
    qlora.done()
    if table is not None:
        _put_table(table, training, _SECTION, out)
    elif set(patterns.values()) == {"constant"}:
        _put_simple(rank, alpha, _CONSTANT, training, _SECTION, out)
    else:

        def at(of: str, stack: int) -> int:
            way = {"constant": 1.0, "increasing": stack / number, "decreasing": 1 - stack / number}[patterns[of]]
            return int(first[of] + way * (last[of] - first[of]))

        _put_table([(at("rank", stack), at("alpha", stack)) for stack in range(number)], training, _SECTION, out)


def _sizes(section: Section, prefix: str, strategy: str, number: int) -> tuple[float, float, list[Size] | None]:
    """Rank and alpha, and the sizes that a table {stack: {rank, alpha}} gives; None without the strategy `variable`.

    Args:
        prefix: of the names of the keys.
        number: of the stacks that become part of a trunk.
    """
    given = [of for of in _SIZE if f"{prefix}{of}" in section]
    rank, alpha = section.number(f"{prefix}rank", 16), section.number(f"{prefix}alpha", 32)
    key = f"{prefix}configs"
    if strategy != "variable":
        section.ignore(key, f"no effect with the strategy {strategy}")
        return rank, alpha, None
    table = section.take(key, {})
    if not isinstance(table, Mapping) or not all(str(stack).isdecimal() for stack in table):
        raise section.error(key, f"{shown(table)} given, a mapping such as {{0: {{rank: 8, alpha: 16}}}} expected")
    if not table:
        section.note(f"{prefix}strategy", f"no effect without {key}: all stacks have the same rank and alpha")
    sizes, written = {}, {}
    for stack, keys in table.items():
        entry = section.inside(key, table).inside(stack, keys)
        written[int(stack)] = [of for of in _SIZE if of in entry]
        sizes[int(stack)] = entry.number("rank", rank), entry.number("alpha", alpha)
        entry.refuse("dropout", _NO_DROPOUT, 0, 0.0)
        entry.done()
    if beyond := [str(stack) for stack in sizes if stack >= number]:
        only = "the first one becomes" if number == 1 else f"the first {number} become"
        section.note(key, f"{', '.join(beyond)}: no effect: of {number + 1} stacks, only {only} part of the trunk")
    for of in given:
        if all(of in written.get(stack, ()) for stack in range(number)):
            section.note(f"{prefix}{of}", f"no effect: {key} has the {of} of every stack")
    return rank, alpha, [sizes.get(stack, (rank, alpha)) for stack in range(number)]


def _patterns(section: Section, prefix: str, strategy: str, allowed: Collection[str]) -> list[Any]:
    """Returns how rank and alpha change from stack to stack. Args: prefix: of the names of the keys."""
    patterns = [section.choice(f"{prefix}{of}_pattern", allowed, "constant") for of in _SIZE]
    if strategy == "progressive":
        if patterns == _CONSTANT:
            section.note(f"{prefix}strategy", "no effect: the patterns of rank and alpha are constant")
        return patterns
    for of, pattern in zip(_SIZE, patterns, strict=True):
        if pattern != "constant":
            section.note(f"{prefix}{of}_pattern", f"no effect with {prefix}strategy: {strategy}")
    return _CONSTANT


def _by_patterns(rank: float, alpha: float, patterns: list[Any], stack: int) -> Size:
    of_rank, of_alpha = patterns
    return max(1, int(by_pattern(rank, of_rank, stack, RANK_STEP))), by_pattern(alpha, of_alpha, stack, ALPHA_STEP)


def _put_simple(rank: float, alpha: float, patterns: list[str], section: Section, key: str, out: Translated) -> None:
    names = ("rank", "alpha", "rank_pattern", "alpha_pattern")
    for name, value in zip(names, (rank, alpha, *patterns), strict=True):
        if value != "constant":
            out.put(f"preset.lora.{name}", value, section, key)


def _put_table(sizes: list[Size], section: Section, key: str, out: Translated) -> None:
    out.put("preset.lora.stacks", [{"rank": rank, "alpha": alpha} for rank, alpha in sizes], section, key)


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
    """Says how many stacks there are.

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
