"""The adapters of a trunk: `qlora_...` of `training.progressive`, or the section `training.qlora`.

In StackWise a stack has adapters of its own, and further ones when it becomes part of the trunk. Both train from then on and
are added up, so here they are one adapter, whose rank is the sum.
"""

from collections.abc import Mapping
from typing import Any

from jaxlm.core.values.stack_pattern import ALPHA_STEP, RANK_STEP, by_pattern
from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

_PATTERNS = ("constant", "increasing", "decreasing", "linear")
_STRATEGIES = ("simplified", "progressive", "variable")
_KEYS = ("qlora_enabled", "qlora_rank", "qlora_alpha", "qlora_strategy", "qlora_rank_pattern", "qlora_alpha_pattern")
_KEYS += ("qlora_configs", "progressive_qlora", "progressive_qlora_rank", "progressive_qlora_alpha")
_SECTION = "qlora"
_FROZEN = (
    "no effect with trunk_strategy: frozen: adapters are frozen with the trunk, and a stack that trains needs none"
)
_NO_DROPOUT = "the adapters of the preset have none. Set it to 0, or write `phases` with the surgery lora"
Size = tuple[float, float]
"""Rank and alpha."""


def drop_adapters(training: Section, progressive: Section, why: str) -> None:
    """Takes the keys of adapters where there are none."""
    for key in _KEYS:
        progressive.ignore(key, why)
    training.ignore(_SECTION, why)


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
    rank, alpha = progressive.number("qlora_rank", 16), progressive.number("qlora_alpha", 32)
    strategy = progressive.choice("qlora_strategy", _STRATEGIES, "simplified")
    patterns = [progressive.choice(f"qlora_{of}_pattern", _PATTERNS, "constant") for of in ("rank", "alpha")]
    table = _variable(progressive, "qlora_configs", strategy, rank, alpha, number)
    more = progressive.number("progressive_qlora_rank", 8), progressive.number("progressive_qlora_alpha", 16)
    if strategy != "progressive":
        if patterns != ["constant", "constant"]:
            progressive.note("qlora_rank_pattern", f"no effect with qlora_strategy: {strategy}")
        patterns = ["constant", "constant"]
    if not of_stack:
        _put_simple(*more, ["constant", "constant"], progressive, "progressive_qlora", out)
    elif not of_trunk and table is None:
        _put_simple(rank, alpha, patterns, progressive, "qlora_rank", out)
    else:
        sizes = table or [_by_patterns(rank, alpha, patterns, stack) for stack in range(number)]
        if of_trunk:
            _note_sum(progressive, sizes, more)
            sizes = [(size[0] + more[0], size[1] + more[1]) for size in sizes]
        if len(set(sizes)) == 1:
            _put_simple(*sizes[0], ["constant", "constant"], progressive, "qlora_rank", out)
        else:
            _put_table(sizes, progressive, "qlora_strategy", out)


def _note_sum(progressive: Section, sizes: list[Size], more: Size) -> None:
    progressive.note(
        "progressive_qlora", "a stack of the trunk has one adapter, whose rank and alpha are the sums of both adapters'"
    )
    if any(alpha * more[0] != more[1] * rank for rank, alpha in sizes):
        progressive.note(
            "progressive_qlora_alpha", "the sum is scaled by its alpha / rank, which is between those of both"
        )


def _put_section(training: Section, number: int, out: Translated) -> None:
    """The section `training.qlora`. Its patterns are linear in the number of the stack, from `progressive_rank` to `rank`."""
    qlora = training.section(_SECTION)
    if not qlora.choice("enabled", (True, False), True):
        raise qlora.error("enabled", "false given with trunk_strategy: qlora, but then nothing in the trunk trains")
    strategy = qlora.choice("strategy", _STRATEGIES, "simplified")
    last = {"rank": qlora.number("rank", 16), "alpha": qlora.number("alpha", 32)}
    first = {"rank": qlora.number("progressive_rank", 8), "alpha": qlora.number("progressive_alpha", 16)}
    patterns = {of: qlora.choice(f"{of}_pattern", _PATTERNS[:3], "constant") for of in last}
    table = _variable(qlora, "configs", strategy, last["rank"], last["alpha"], number)
    qlora.ignore("progressive_enabled", "no effect: strategy says it")
    qlora.refuse("dropout", _NO_DROPOUT, 0, 0.0)
    qlora.ignore("lr", "no effect: adapters have the learning rate of the optimizer")
    qlora.ignore("mixed_precision", "no effect: preset.store says how the trunk is stored; adapters are float32")
    qlora.done()
    if table is not None:
        _put_table(table, training, _SECTION, out)
    elif strategy == "simplified" or set(patterns.values()) == {"constant"}:
        _put_simple(last["rank"], last["alpha"], ["constant", "constant"], training, _SECTION, out)
    else:

        def at(of: str, stack: int) -> int:
            way = {"constant": 1.0, "increasing": stack / number, "decreasing": 1 - stack / number}[patterns[of]]
            return int(first[of] + way * (last[of] - first[of]))

        _put_table([(at("rank", stack), at("alpha", stack)) for stack in range(number)], training, _SECTION, out)


def _variable(section: Section, key: str, strategy: str, rank: float, alpha: float, number: int) -> list[Size] | None:
    """The sizes of a table {stack: {rank, alpha}}; None without the strategy `variable`."""
    if strategy != "variable":
        section.ignore(key, f"no effect with the strategy {strategy}")
        return None
    given = section.take(key, {})
    if not isinstance(given, Mapping) or not all(str(stack).isdecimal() for stack in given):
        raise section.error(key, f"{given!r} given, a mapping such as {{0: {{rank: 8, alpha: 16}}}} expected")
    sizes = {}
    for stack, keys in given.items():
        one = section.inside(key, given).inside(stack, keys)
        sizes[int(stack)] = one.number("rank", rank), one.number("alpha", alpha)
        one.refuse("dropout", _NO_DROPOUT, 0, 0.0)
        one.done()
    if beyond := [stack for stack in sizes if stack >= number]:
        section.note(key, f"{beyond[0]}: no effect: of {number + 1} stacks, the last never becomes part of the trunk")
    return [sizes.get(stack, (rank, alpha)) for stack in range(number)]


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
