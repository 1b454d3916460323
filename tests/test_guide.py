"""The guide names every key there is, with its default; and its YAML, like that of all documents, is read without error."""

import dataclasses
import re
from pathlib import Path

import pytest

from jaxlm.config import PhaseConfig, RunConfig, TrainerConfig, decode_run
from jaxlm.core.decode import encode
from jaxlm.core.runtime import DistributedConfig
from jaxlm.core.yaml_source import Source, load_yaml
from jaxlm.data.config import DataConfig
from jaxlm.engine.profiler import ProfilerConfig
from jaxlm.engine.save_policy import CheckpointerConfig, KeepRule
from jaxlm.engine.trackers import TrackerConfig
from jaxlm.evals.base import EvalConfig
from jaxlm.models.base import ModelConfig
from jaxlm.models.rotary import RotaryConfig
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.optim.base import OptimizerConfig
from jaxlm.surgery.base import SurgeryConfig

ROOT = Path(__file__).parents[1]
REGISTRIES = (ModelConfig, RotaryConfig, OptimizerConfig, ObjectiveConfig, EvalConfig, SurgeryConfig, TrackerConfig)
SECTIONS = [
    RunConfig,
    DataConfig,
    TrainerConfig,
    CheckpointerConfig,
    KeepRule,
    ProfilerConfig,
    DistributedConfig,
    PhaseConfig,
]
SECTIONS += [kind for registry in REGISTRIES for kind in registry.get_known_choices().values()]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def default_of(field: dataclasses.Field) -> object:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_key_is_in_the_guide_with_its_default(kind):
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]*) \|$", (ROOT / "docs" / "guide.md").read_text(), re.MULTILINE
    )
    for field in dataclasses.fields(kind):
        shown = {default for name, default, meaning in rows if name == field.name and meaning.strip()}
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            assert "required" in shown, field.name
        elif dataclasses.is_dataclass(default_of(field)):
            assert "its own table" in shown, field.name
        else:
            value = encode(default_of(field))
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            assert f"`{text if len(text) <= 60 else text[:57] + '...'}`" in shown, field.name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_yaml_in_the_documents_can_be_read(path, tmp_path):
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)):
        (tmp_path / f"{number}.yaml").write_text(block)
        decode_run(Source(load_yaml(tmp_path / f"{number}.yaml").tree), "document")
