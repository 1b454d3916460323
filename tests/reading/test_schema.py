"""Listing a configuration's sections: every section once, every key with its type, default and meaning."""

from dataclasses import dataclass, field

import draccus

from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.schema import ConfigKey, attribute_docs, sections


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        every: how often.
    """

    every: int


@dataclass(frozen=True)
class Shape(draccus.ChoiceRegistry):
    """A shape.

    Attributes:
        size, weight: two numbers of one meaning.
    """

    size: int = 1
    weight: float | None = None


@Shape.register_subclass("square")
@dataclass(frozen=True)
class Square(Shape):
    """A square."""


@Shape.register_subclass("ring")
@dataclass(frozen=True)
class Ring(Shape):
    """A ring.

    Attributes:
        width: spread over
            two lines.
    """

    size: int = 4
    width: int = 2


@dataclass(frozen=True)
class Whole:
    """A whole.

    Attributes:
        shape: of one kind.
        rules: in order.
        named: by name.
        perhaps: or not.
    """

    shape: Shape = field(default_factory=lambda: Ring(width=7))
    rules: list[Rule] = field(default_factory=list)
    named: dict[str, Shape | list[Rule]] = field(default_factory=dict)
    perhaps: Rule | None = None


@dataclass(frozen=True)
class Optional:
    """The only use of this section is optional.

    Attributes:
        rule: or none.
    """

    rule: Rule | None = None


def test_every_section_is_listed_once_with_its_own_keys():
    top, shape, ring, square, rule = sections(Whole)
    assert [key.name for key in top.keys] == ["shape", "rules", "named", "perhaps"]
    assert top.keys[0] == ConfigKey("shape", "section", None, "of one kind.")
    assert top.keys[1] == ConfigKey("rules", "list of section", "[]", "in order.")
    assert top.keys[3] == ConfigKey("perhaps", "section or null", "null", "or not.")
    assert (shape.path, shape.choice, [key.name for key in shape.keys]) == ("shape", None, ["size", "weight"])
    assert shape.keys[1] == ConfigKey("weight", "float or null", "null", "two numbers of one meaning.")
    # The default choice's own values are shown. Keys that all choices share are not repeated.
    assert (ring.choice, ring.is_default) == ("ring", True)
    assert [(key.name, key.default) for key in ring.keys] == [("size", "4"), ("width", "7")]
    assert (square.choice, square.is_default, square.keys) == ("square", False, ())
    assert (rule.path, rule.meaning, rule.is_default) == ("rules.N", "in order.", True)
    assert rule.keys == (ConfigKey("every", "int", "required", "how often."),)


def test_an_optional_section_is_listed():
    _, rule = sections(Optional)
    assert (rule.path, rule.is_default) == ("rule", False)


def test_sections_in_a_type_follow_the_last_type():
    """Otherwise the help shows the keys of the types after it below its heading."""
    found = [(section.path, section.choice) for section in sections(RunConfig)]
    types = [number for number, (path, choice) in enumerate(found) if path == "optimizer" and choice]
    assert types == list(range(types[0], types[0] + len(types)))
    assert found.index(("optimizer.clip_update_norm", None)) > types[-1]


def test_attribute_docs_come_from_all_bases():
    meaning = "two numbers of one meaning."
    assert attribute_docs(Ring) == {"size": meaning, "weight": meaning, "width": "spread over two lines."}
