"""The guide is what the dataclasses make it; and its YAML, like that of all documents, is read without error."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxlm.config import RunConfig, decode_run
from jaxlm.core.keys import sections
from jaxlm.core.yaml_source import Source, load_yaml
from jaxlm.interop.family import config_to_json, family_of_config
from jaxlm.interop.safetensors_file import TensorInfo, write_safetensors
from jaxlm.models.qwen3 import Qwen3Config

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guide_is_up_to_date():
    written = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert written == script("generate_guide").guide(), "run `python docs/generate_guide.py`"


def test_the_pictures_are_up_to_date():
    for name, content in script("generate_pictures").pictures().items():
        written = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert written == content, "run `python docs/generate_pictures.py`"
        assert f"](pictures/{name})" in (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
        ElementTree.fromstring(content)


def test_every_key_has_a_meaning():
    found = list(sections(RunConfig))
    assert {f.name for f in dataclasses.fields(RunConfig)} == {key.name for key in found[0].keys}
    assert [f"{s.path}.{key.name}" for s in found for key in s.keys if not key.meaning] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_yaml_in_the_documents_can_be_read(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("qwen-small", "adapter-folder"):  # of which the documents speak
        Path(folder).mkdir()
    Path("adapter-folder/adapter_config.json").write_text(
        '{"peft_type": "LORA", "bias": "none", "r": 1, "lora_alpha": 1}'
    )
    adapter = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((1, 8), np.float32)}
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in adapter.items()}
    write_safetensors(Path("adapter-folder/adapter_model.safetensors"), infos, adapter.values())
    described = config_to_json(family_of_config(Qwen3Config()), Qwen3Config())
    Path("qwen-small/config.json").write_text(json.dumps(described | {"vocab_size": 99}))
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)):
        (tmp_path / f"{number}.yaml").write_text(block)
        decode_run(Source(load_yaml(tmp_path / f"{number}.yaml").tree), "document")
