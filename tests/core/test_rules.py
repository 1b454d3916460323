"""Rules between the keys of a section: each verb by itself, in a file with lines, in the help text, and all that exist."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.core.rules import Rules, excludes, needs, one_of, only, ordered, rules_of, some_of, together, unused
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.schema import sections


@dataclass(frozen=True)
class Inner:
    fill: str = "pad"


@dataclass(frozen=True)
class Section:
    kind: str = "plain"
    a: int | None = None
    b: int | None = None
    names: list[str] = field(default_factory=list)
    inner: Inner | None = None


def section(*rules, **keys):
    @dataclass(frozen=True)
    class Ruled(Section):
        pass

    Ruled.key_rules = rules
    return Ruled(**keys)


IS_KIND = {"when": "kind", "is_": ("x", "y")}

KEPT = [
    section(only("a", "names", **IS_KIND)),
    section(only("a", **IS_KIND), a=1, kind="y"),
    section(only("a", when="b"), a=1, b=0),
    section(needs("a", **IS_KIND)),
    section(needs("a", **IS_KIND), a=0, kind="x"),
    section(excludes("a", "b", "names"), b=1),
    section(excludes("a", **IS_KIND), a=1),
    section(excludes("a", **IS_KIND), kind="x"),
    section(one_of("a", "b"), a=0),
    section(some_of("a", "b"), a=0, b=0),
    section(together("a", "b")),
    section(together("a", "b"), a=1, b=1),
    section(ordered("a", "b")),
    section(ordered("a", "b"), a=3),
    section(ordered("a", "b"), a=3, b=3),
    section(unused("a", why="Y has none"), b=2),
    section(only("inner.fill", when="b"), inner=Inner()),
    section(only("inner.fill", when="b")),
]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.key_rules[0].text)
def test_what_keeps_a_rule_is_accepted(kept):
    check_fields(kept)


BROKEN = {
    "s.names: ['n'] given without kind: x or y, as it is, but kind is plain. Remove it, or set kind": section(
        only("a", "names", why="as it is", **IS_KIND), names=["n"]
    ),
    "s.a: 0 given without b. Remove it, or set b": section(only("a", when="b"), a=0),
    "s.kind: y given without a. Set a": section(needs("a", **IS_KIND), kind="y"),
    "s.a: 1 given together with names: ['n'], why not. Remove one of them": section(
        excludes("a", "b", "names", why="why not"), a=1, names=["n"]
    ),
    "s.a: 1 given together with kind: x. Remove one of them": section(excludes("a", **IS_KIND), a=1, kind="x"),
    "s.a: none of a, b given, exactly one expected. Set one of them": section(one_of("a", "b")),
    "s.a: 1 given together with b: 2. Remove one of them": section(one_of("a", "b"), a=1, b=2),
    "s.a: none of a, names given, at least one expected. Set one of them": section(some_of("a", "names")),
    "s.b: 2 given without a. Set all of a, b, or none": section(together("a", "b"), b=2),
    "s.b: 2 given, but a is 3. a <= b expected": section(ordered("a", "b"), a=3, b=2),
    "s.b: 3 given, but a is 3. a < b expected": section(ordered("a", "b", strictly=True), a=3, b=3),
    "s.b: 2 given, but Y has none. Remove it": section(unused("a", "b", why="Y has none"), b=2),
    "s.inner.fill: cut given without b. Remove it, or set b": section(only("inner.fill", when="b"), inner=Inner("cut")),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_breaks_a_rule_is_refused_with_both_keys(message):
    with pytest.raises(ConfigError) as refused:
        check_fields(BROKEN[message], "s")
    assert str(refused.value) == message


def test_rules_of_bases_hold_too():
    class Base(Section):
        key_rules: ClassVar[Rules] = (ordered("a", "b"),)

    class Own(Base):
        key_rules: ClassVar[Rules] = (only("names", when="a"),)

    assert [rule.text for rule in rules_of(Own)] == ["a <= b", "names: only with a"]


def test_all_rules_name_keys_of_their_sections():
    """A key in a section inside is written `packing.fill`."""
    shared = {section.path: [key.name for key in section.keys] for section in sections(RunConfig) if not section.names}
    ruled = [section for section in sections(RunConfig) if section.rules]
    assert ruled
    for section in ruled:
        names = {*section.names, *shared.get(section.path, ())}
        for rule in section.rules:
            assert {key.partition(".")[0] for key in rule.keys} <= names, (section.path, rule.text)
