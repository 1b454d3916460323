"""Values that no key can have: every key either refuses them in one message, or makes a plan of them."""

import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import load_config
from jaxlm.plan.plan import make_plan
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.schema import sections
from tests.reading.test_load import GOOD

VALUES = [
    ".inf",
    "-.inf",
    ".nan",
    "1e400",
    "1e39",
    "9" * 400,
    "9" * 5000,
    "-1",
    "0",
    "1",
    "0.5",
    "-0.5",
    "1e12",
    "1e30",
    "-1e30",
    "2026-13-45",
    "!!int foo",
    "!!timestamp foo",
    "!!python/object:os.system x",
    "0x_",
    "0x10",
    "1:30",
    "[" * 600,
    "&x [*x]",
    "&x {a: *x}",
    '"\\0"',
    '"a\\u0007b"',
    '"\\ud800"',
    "''",
    "'('",
    "~nosuchuser/x",
    "ftp://nowhere.invalid/x",
    "[1]",
    "[[1, [2]]]",
    "[null]",
    "{}",
    "[]",
    "{a: b}",
    "{type: [1]}",
    "{type: nothing}",
    "null",
    "true",
    "x",
]


def all_keys() -> list[tuple[str, str | None]]:
    """The path of each key, with N for an index and NAME for a name, and the `type` of its section, if it has one."""
    return [
        (f"{section.path}.{key.name}".lstrip("."), section.choice)
        for section in sections(RunConfig)
        for key in section.keys
    ]


def options_for(path: str, choice: str | None, value: str) -> list[str]:
    """Options that set a key, and the `type` of its section. A list gets one entry."""
    *parents, key = path.replace("NAME", "x").split(".")
    outer = parents[: parents.index("N")] if "N" in parents else parents
    inner = parents[len(outer) + 1 :]
    chosen = f"type: {choice}, " if choice and key != "type" else ""
    if "N" not in parents:
        return [f"--{path.replace('NAME', 'x')}={value}", *([f"--{'.'.join(parents)}.type={choice}"] if chosen else [])]
    text = f"{{{chosen}{key}: {value}}}"
    for section in reversed(inner):
        text = f"{{{section}: {text}}}"
    named = "name: a, " if outer == ["phases"] and path != "phases.N.name" else ""
    return [f"--{'.'.join(outer)}=[{{{named}{text[1:]}]"]


def outcome(folder: Path, path: str, choice: str | None, value: str) -> str:
    """What becomes of a configuration with a value: `refused` or `planned`. Any other exception is passed on."""
    (folder / "run.yaml").write_text(GOOD)
    try:
        arguments = ["--config_path", str(folder / "run.yaml"), *options_for(path, choice, value)]
        make_plan(load_config(arguments, "jaxlm.train"), "x", 300)
    except ConfigError as error:
        return "refused" if 10 < len(str(error)) < 2000 else f"refused with a message of {len(str(error))} characters"
    return "planned"


KEYS = all_keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@settings(max_examples=60)
@given(st.sampled_from(KEYS), st.sampled_from(VALUES))
def test_a_key_refuses_a_value_in_one_message_or_makes_a_plan(folder, key, value):
    assert outcome(folder, *key, value) in ("refused", "planned")


@pytest.mark.soak
@pytest.mark.slow
def test_every_key_with_every_value(folder):
    counts, slowest = Counter(), (0.0, "")
    for key in KEYS:
        for value in VALUES:
            began = time.perf_counter()
            counts[outcome(folder, *key, value)] += 1
            slowest = max(slowest, (time.perf_counter() - began, f"{key} {value[:20]}"))
    print(f"{len(KEYS)} keys: {dict(counts)}, slowest {slowest}")
    assert slowest[0] < 10
    assert counts.keys() == {"refused", "planned"}
