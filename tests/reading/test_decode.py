"""Decoding values into dataclasses: valid values, refused values, and round trips through `dump`."""

import abc
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

import draccus
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.objectives.base import ObjectiveFacts
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.base import OptimizerConfig
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.muon import MuonConfig
from jaxlm.plan.refs.hf import HfRefConfig
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.choices import choice, signature_problems
from jaxlm.reading.decode import decode, drop_stale_keys, dump, encode
from jaxlm.reading.yaml import ConfigSource


@dataclass(frozen=True)
class Shape(draccus.ChoiceRegistry, abc.ABC):
    pass


@Shape.register_subclass("circle")
@dataclass(frozen=True)
class Circle(Shape):
    radius: float = 1.0
    label: str = ""


@Shape.register_subclass("square")
@dataclass(frozen=True)
class Square(Shape):
    side: int = 2
    label: str = ""


@dataclass(frozen=True)
class Inner:
    text: str
    wait: timedelta = timedelta(seconds=1)


@dataclass(frozen=True)
class Outer:
    count: int = 1
    share: float = 0.5
    on: bool = False
    name: str | None = None
    axes: str | list[str] | None = None
    mode: Literal["a", "b"] = "a"
    sizes: list[int] = field(default_factory=list)
    paths: list[str] | None = None
    mapping: dict[str, str | list[str]] = field(default_factory=dict)
    shape: Shape = field(default_factory=Circle)
    shapes: list[Shape] = field(default_factory=list)
    inner: Inner = field(default_factory=lambda: Inner("x"))
    anything: Any = None


def read(**tree) -> Outer:
    return decode(Outer, ConfigSource(tree))


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"count": 512.0}, 512),
        ({"share": 1}, 1.0),
        ({"axes": ["a", "b"]}, ["a", "b"]),  # a union with `str` first must not turn the list into text
        ({"axes": "a"}, "a"),
        ({"axes": None}, None),
        ({"mapping": {"x": ["r", "d"], "y": "z"}}, {"x": ["r", "d"], "y": "z"}),
        ({"shape": {"type": "square", "side": 3}}, Square(3)),
        ({"shape": {"radius": 3}}, Circle(3.0)),  # without a `type`, the default type is used
        ({"shapes": [{"type": "square"}, {"type": "circle"}]}, [Square(), Circle()]),
        ({"inner": {"text": "t", "wait": "2m"}}, Inner("t", timedelta(minutes=2))),
    ],
)
def test_valid_values_are_decoded(given, value):
    name = next(iter(given))
    read_value = getattr(read(**given), name)
    assert read_value == value
    assert type(read_value) is type(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": None}, "count: null given, an integer expected"),
        ({"count": 1.5}, "count: 1.5 given, an integer expected"),
        ({"count": True}, "count: true given, an integer expected"),
        ({"count": "1"}, "count: '1' given, an integer expected. Write 1 without quotes"),
        ({"share": "6E-4"}, "share: '6E-4' given, a finite number expected. Write 6E-4 without quotes"),
        ({"share": 1e300}, "share: 1e+300 given, a finite number of at most 3.4e+38 expected"),
        ({"share": 10**39}, "0 given, a finite number of at most 3.4e+38 expected"),
        ({"share": -1e300}, "share: -1e+300 given, a finite number of -3.4e+38 or more expected"),
        ({"on": "true"}, "on: 'true' given, true or false expected. Write true without quotes"),
        ({"paths": "a.txt"}, "paths: 'a.txt' given, a list (each entry a string) or null expected. Write [a.txt]"),
        ({"name": "a\0"}, "expected without control characters"),
        ({"on": 1}, "on: 1 given, true or false expected"),
        ({"name": 3}, "name: 3 given, a string or null expected"),
        ({"mode": "c"}, "mode: 'c' given, 'a' or 'b' expected"),
        ({"sizes": 3}, "sizes: 3 given, a list"),
        ({"sizes": [1, "x"]}, "sizes.1: 'x' given"),
        ({"mapping": {"x": 1}}, "mapping.x: 1 given"),
        (
            {"shape": {"type": "sqare"}},
            "shape.type: 'sqare' given. Allowed: circle, half, square. Did you mean 'square'?",
        ),
        ({"shapes": [{}]}, "shapes.0.type: no type given. Allowed: circle, half, square"),
        ({"shape": {"side": 2}}, "no such key in shape (type circle)"),
        ({"shape": 3}, "shape: 3 given, a section"),
        (
            {"shapes": ["circle"]},
            "shapes.0: 'circle' given, a section with keys expected (type, ...). Write {type: circle}",
        ),
        ({"shapes": ["round"]}, "shapes.0: 'round' given, a section with keys expected (type, ...)"),
        ({"k" * 9000: 1}, f"{'k' * 200}... (9,000 characters): no such key in the top level"),
        ({"inner": {}}, "the key 'text' is missing"),
        ({"inner": {"text": "t", "wait": "soon"}}, "inner.wait"),
        ({"cuont": 1}, "Did you mean 'count'?"),
    ],
)
def test_invalid_values_are_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        read(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["count", "on", "mode", "sizes", "paths"])
def test_an_empty_text_gets_no_hint_with_nothing_in_it(key):
    with pytest.raises(ConfigError, match=rf"^{key}: '' given, .* expected$"):
        read(**{key: ""})


def test_errors_name_file_and_line():
    source = ConfigSource({"inner": {"text": 1}}, {("inner", "text"): "run.yaml:7"})
    with pytest.raises(ConfigError, match=r"^run\.yaml:7: inner\.text: 1 given"):
        decode(Outer, source)


outers = st.builds(
    Outer,
    count=st.integers(-(10**9), 10**9),
    share=st.floats(allow_nan=False, allow_infinity=False, width=32),
    on=st.booleans(),
    name=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"))),
    axes=st.none() | st.sampled_from(["embed", ["mlp", "heads"], []]),
    mode=st.sampled_from(["a", "b"]),
    sizes=st.lists(st.integers(0, 9), max_size=3),
    mapping=st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["a", ["a", "b"]])),
    shape=st.sampled_from([Circle(2.5, "true"), Square(7, "3")]),
    shapes=st.lists(st.sampled_from([Circle(), Square()]), max_size=3),
    inner=st.builds(Inner, text=st.sampled_from(["null", "1", "1e3", "yes", "a: b"]), wait=st.timedeltas(timedelta(0))),
)


@settings(max_examples=25)
@given(outers)
def test_dumped_values_decode_to_an_equal_object(value):
    assert decode(Outer, ConfigSource(yaml.safe_load(dump(value)))) == value
    assert encode(value)["shape"]["type"] in ("circle", "square")


def test_draccus_dumps_a_run():
    config = replace(
        RunConfig(), optimizer=MuonConfig(groups=[AdamConfig(match="tokens")]), refs={"teacher": HfRefConfig("p")}
    )
    dumped = draccus.dump(config)
    assert decode(RunConfig, ConfigSource(yaml.safe_load(dumped))) == config


def test_changing_the_type_drops_the_old_types_keys():
    file = {"shape": {"type": "circle", "radius": 3.0, "label": "kept"}, "count": 2}
    assert drop_stale_keys(Outer, file, {"shape": {"type": "square"}}) == ["shape.radius"]
    assert file == {"shape": {"type": "circle", "label": "kept"}, "count": 2}


def test_keeping_the_type_keeps_all_keys():
    file = {"shape": {"radius": 3.0}}
    assert drop_stale_keys(Outer, file, {"shape": {"type": "circle", "label": "x"}}) == []
    assert file == {"shape": {"radius": 3.0}}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (lambda value: {"share": value}, "share: {}.* given, a finite number expected"),
        (lambda value: {"shape": {"type": "square", "side": value}}, "shape.side: {}.* given, an integer expected"),
    ],
)
def test_numbers_are_finite(tree, expected, value):
    with pytest.raises(ConfigError, match=expected.format(value)):
        read(**tree(value))


@Shape.register_subclass("half")
@dataclass(frozen=True)
class Half(Shape):
    @abc.abstractmethod
    def area(self): ...


def test_a_class_that_lacks_a_method_is_named():
    with pytest.raises(ConfigError, match="shape: the class Half does not define area"):
        read(shape={"type": "half"})


@dataclass(frozen=True)
class NoSlot(NextToken):
    def terms(self, model, batch, *, key): ...


@dataclass(frozen=True)
class FactsAsAMethod(NextToken):
    def facts(self): ...


@dataclass(frozen=True)
class MoreParameters(NextToken):
    facts = ObjectiveFacts(references=("teacher",))

    def terms(self, model, batch, *slot_and_more, key=None, scale=1.0, **options): ...

    def _helper(self, anything): ...


OTHER_PARAMETERS = """\
the class NoSlot defines terms(self, model, batch, *, key), but it is called as terms(self, model, batch, slot, *, key). \
Change its parameters"""
A_METHOD = "the class FactsAsAMethod defines facts as a method, but it is a property. Add @property"


@pytest.mark.parametrize(
    ("kind", "problems"),
    [(NoSlot, [OTHER_PARAMETERS]), (FactsAsAMethod, [A_METHOD]), (MoreParameters, []), (NextToken, [])],
)
def test_a_method_with_other_parameters_than_its_calls_is_named(kind, problems):
    assert list(signature_problems(kind)) == problems


def test_a_name_of_jaxlms_own_types_cannot_be_taken():
    with pytest.raises(ConfigError, match=r"registers .*Mine under this name, .* jaxlm\.optim\.elementwise"):

        @choice(OptimizerConfig, "adam")
        class Mine(OptimizerConfig):
            pass
