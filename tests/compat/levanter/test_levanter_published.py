"""The configurations that Levanter publishes: how many are planned unchanged, and how many start on tiny data."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlm.compat.levanter.from_levanter import from_levanter
from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import decode_run, run_id_of
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource, load_yaml
from jaxlm.session.dry_run import assumed_vocabulary

_ROOT = Path(__file__).parents[3]
_TABLE = load_yaml(_ROOT / "tests" / "vectors" / "levanter_configs.yaml").tree
# Why the others are not: with a network, or with a folder in its place, the weights of Llama 2 would be found.
NOT_PLANNED = {
    "gemma_2b": "initialize_from_hf: 'google/gemma-2b' must be a folder",
    "llama2_7b_continued": "initialize_from_hf: 'NousResearch/Llama-2-7b-hf' must be a folder",
}
PLANNED = sorted(_TABLE["runs"].keys() - NOT_PLANNED)


def published(name: str) -> dict[str, Any]:
    """A configuration with the sections that it shares with others."""
    run, shared = _TABLE["runs"][name], _TABLE["sections"]
    whole = {key: shared[value[1:]] if str(value).startswith("=") else value for key, value in run.items()}
    return json.loads(json.dumps(whole))


def plan(name: str) -> None:
    source, _ = from_levanter(ConfigSource(published(name)))
    config = decode_run(source, name)
    make_plan(config, run_id_of(config), assumed_vocabulary(config)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_is_planned_unchanged(name):
    if str(published(name).get("hf_save_path")).startswith("gs://"):
        pytest.importorskip("gcsfs")
    plan(name)


@pytest.mark.parametrize("name", NOT_PLANNED)
def test_says_why_it_is_not_planned(name):
    with pytest.raises(ConfigError, match=NOT_PLANNED[name]):
        plan(name)


def test_the_page_has_the_number():
    text = (_ROOT / "docs" / "from-levanter.md").read_text()
    assert f"**{len(PLANNED)} of {len(_TABLE['runs'])}**" in text
    assert all(f"`{name}`" in text for name in NOT_PLANNED)
