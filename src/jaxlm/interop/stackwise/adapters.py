"""The adapters of a trunk: `qlora_...` of `training.progressive`, or the section `training.qlora`.

In StackWise a stack has adapters of its own, and further ones when it becomes part of the trunk. Both train from then on and
are added up, so here they are one adapter, whose rank is the sum.
"""

from collections.abc import Collection, Mapping
from typing import Any, get_args

from jaxlm.core.errors import shown
from jaxlm.core.values.stack_pattern import ALPHA_STEP, RANK_STEP, Pattern, by_pattern
from jaxlm.interop.section import Section
from jaxlm.interop.stackwise.kinds import LINEAR_PATTERNS, QLORA_KEYS, STRATEGIES, check_kinds
from jaxlm.interop.translated import Translated

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
    """How rank and alpha change from stack to stack. Args: prefix: of the names of the keys."""
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
