"""The guide agrees with the dataclasses, and the YAML in all documents is valid."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.qwen3 import Qwen3Config
from jaxlm.interop.hf.family import config_to_json, family_of_config
from jaxlm.interop.hf.safetensors_file import TensorInfo, write_safetensors
from jaxlm.plan.load_config import decode_run, read_config
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.choices import is_import_path
from jaxlm.reading.schema import ConfigSection, sections
from jaxlm.reading.yaml import ConfigSource, load_yaml, merge, parse_value
from jaxlm.systems.nanochat.scaling_members import plan_study
from jaxlm.systems.topology.layers import _DECOUPLED
from tests.fields.model_table import ROUTED
from tests.fields.proofs import assert_test_exists

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# Keys that another key must be set for.
DECOUPLED = {"mode": "decoupled", "sem_dim": 8, "geo_dim": 8}
NEEDED: dict[tuple[str, str | None, str], dict[str, Any]] = {
    ("", None, "use_hf_model_config"): {"initialize_from_hf": "qwen-small"},
    ("trainer.distributed", None, "coordinator_address"): {"num_processes": 2, "process_id": 0},
    ("trainer.distributed", None, "num_processes"): {"coordinator_address": "10.0.0.1:8476", "process_id": 0},
    ("trainer.distributed", None, "process_id"): {"coordinator_address": "10.0.0.1:8476", "num_processes": 2},
    ("trainer.mp.rules.N", None, "match"): {"compute": "float32"},
    ("evals.N.cases.N", None, "choices"): {"kind": "choice_logprob", "answer": "4"},
    ("trainer.until", None, "metric"): {"below": 3.2},
    ("trainer.until", None, "mode"): {"above": 0.5},
    ("preset", "progressive", "lora"): {"trunk": "lora"},
    ("objective", "distill", "cache"): {"top_k": 8},
    ("objective", "dpo", "cache"): {"reference": "base"},
    ("objective", "grpo", "cache"): {"reference": "base"},
    ("objective", "kto", "cache"): {"reference": "base"},
    ("model.time_embedding", None, "type"): {"num_time_steps": 8},
    ("model.time_embedding", None, "num_time_steps"): {"type": "learned"},
    **{
        ("model", "gemma4", f"expert_{name}"): ROUTED["model"] for name in ("dispatch", "products", "capacity", "parts")
    },
    ("model", "gemma4", "double_wide_mlp"): {"num_kv_shared_layers": 2},
    **{("model.topology", "attention", name): DECOUPLED for name in ("mode", *_DECOUPLED)},
    ("data", "tokens", "train_overlap"): {"stride": 512},
    ("data", "rollouts", "max_turns"): {"environment": {"type": "tool"}},
    ("data.sampler", "server", "protocol"): {"logprobs": "processed"},
    ("data.rewards.N", "model", "name"): {"path": "exports/reward"},
    ("data.rewards.N", "model", "protocol"): {"path": "exports/reward"},
    ("data.rewards.N", "model", "text"): {"path": "exports/reward"},
    ("data.format", "pairs", "prompt_ends_with"): {"prompt_field": None},
    ("data", None, "added_tokens"): {"tokenizer": "tokenizers/mine.json"},
    ("data", None, "train_weights"): {"configs": {"wiki": {"train_urls": ["wiki/*.jsonl"]}}},
    ("data", None, "name"): {"id": "roneneldan/TinyStories"},
    ("data", None, "split"): {"id": "roneneldan/TinyStories"},
    ("data", None, "stream"): {"id": "roneneldan/TinyStories"},
    ("data", None, "validation_split"): {"id": "roneneldan/TinyStories"},
    ("data.configs.NAME", None, "name"): {"id": "roneneldan/TinyStories"},
    ("data.configs.NAME", None, "split"): {"id": "roneneldan/TinyStories"},
    ("data.configs.NAME", None, "stream"): {"id": "roneneldan/TinyStories"},
    ("data.configs.NAME", None, "validation_split"): {"id": "roneneldan/TinyStories"},
}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_of_the_guide_is_linked_from_its_first_one():
    first = (ROOT / "docs" / "guide" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\* \[[^]]+\]\((\w+\.md)\)", first, re.MULTILINE)) == script("guide_pages").pages().keys()


@pytest.mark.slow
def test_every_module_is_listed_with_its_first_line():
    listed = script("module_list").modules()
    modules = [path for path in (ROOT / "src").rglob("*.py") if path.name != "__init__.py"]
    assert len(re.findall(r"^\| `\w+\.py` \| \S.* \|$", listed, re.MULTILINE)) == len(modules)


def test_every_key_is_in_the_guide_once_and_linked_from_the_index():
    pages = script("guide_pages").pages()
    anchors = [(name, anchor) for name, text in pages.items() for anchor in re.findall(r'<a id="([^"]+)"></a>', text)]
    assert len(anchors) == len(set(anchors))
    links = [tuple(link) for link in re.findall(r"^\| \[`\w+`\]\((\w+\.md)#([^)]+)\)", pages["keys.md"], re.MULTILINE)]
    assert set(links) == set(anchors)
    keys = {key.name for section in sections(RunConfig) for key in section.keys}
    assert {anchor.rpartition(".")[2] for _, anchor in anchors} == keys


def test_one_page_lists_all_pages_and_the_home_page_a_few(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    listed = (ROOT / "docs" / "all-pages.md").read_text(encoding="utf-8")
    assert listed == script("generate_reference").all_pages(), "run `python docs/generate_reference.py`"
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages ^ set(re.findall(r"\]\(([^)#]+\.md)\)", listed)) == {"index.md", "all-pages.md"}
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert 10 <= len(re.findall(r"\]\([^)]+\.md[^)]*\)", home)) <= 20
    assert re.search(r"!\[.+\]\(pictures/.+\)", home)


COLUMN = 100  # characters that a code block of the site shows at 1,280 pixels, both side bars open (docs/style.css)


def test_no_code_block_is_wider_than_its_column(monkeypatch):
    """Text that programs print, and JSON records, wrap instead."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    fence = re.compile(r"^( *)(`{3,})\{?[ .]*(\w*)[^\n`]*\n(.*?)^ *\2 *$", re.MULTILINE | re.DOTALL)
    texts = {str(page): page.read_text(encoding="utf-8") for page in DOCUMENTS}
    for name, text in (texts | script("guide_pages").pages()).items():
        for block in fence.finditer(text):
            assert block[3], f"{name}: a code block without a language: {block[4][:60]}"
            if block[3] not in ("text", "json"):
                wide = [line for line in block[4].splitlines() if len(line) - len(block[1]) > COLUMN]
                assert not wide, f"{name}: comments go on lines of their own, and long commands on several: {wide}"


def test_the_search_ranks_help_above_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    search = script("search_rank").search
    order = ["start/install.md", "howto/grpo.md", "guide/optimizer.md", "benchmarks.md", "design/0026-controllers.md"]
    boosts = [search(page)["boost"] for page in order]
    assert boosts == sorted(set(boosts), reverse=True)
    assert search("source/engine-step.md") == search("all-pages.md") == {"exclude": True}


def test_each_hop_of_the_walk_calls_the_next(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    links = script("source_links")
    walk = (ROOT / "docs" / "reference" / "walk.md").read_text(encoding="utf-8")
    for match in links.LINK.finditer(walk):
        assert match["name"] in links.definitions(match["file"]), f"{match['file']} does not define {match['name']}"
    hops = [match for row in walk.partition("Six hops")[0].splitlines() for match in links.LINK.finditer(row)]
    assert len(hops) == 7  # main and six hops
    code = ""
    for match in hops:
        first, last = links.definitions(match["file"])[match["name"]]
        name = match["name"].rpartition(".")[2]
        assert not code or re.search(rf"\b{name}\b", code), f"nothing before {name} calls it"
        code += "\n".join((ROOT / match["file"]).read_text(encoding="utf-8").splitlines()[first:last])


def test_the_diagrams_are_up_to_date():
    for name, content in script("generate_pictures").pictures().items():
        written = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert written == content, "run `python docs/generate_pictures.py`"
        assert f"](pictures/{name})" in (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
        ElementTree.fromstring(content)


def test_every_test_in_the_documents_exists():
    text = "".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    names = set(re.findall(r"`(tests/[\w/]+\.py::(?:\w+::)?test_\w+)`", text))
    assert len(names) > 60
    for name in sorted(names):
        assert_test_exists(name)


def test_every_key_has_a_meaning():
    found = list(sections(RunConfig))
    assert {f.name for f in dataclasses.fields(RunConfig)} == {key.name for key in found[0].keys}
    assert [f"{s.path}.{key.name}" for s in found for key in s.keys if not key.meaning] == []


MASKED = {"objective": {"type": "mlm"}, "data": {"masking": {"min_mask_fraction": 0.15}}}
# What else some sections, and single keys, need.
BESIDE: dict[str, dict[str, Any]] = {
    "preset.depth_times": MASKED,
    "preset.lora": {"preset": {"trunk": "lora"}},
    "preset.lora.stacks.N": {"preset": {"trunk": "lora"}},
    "objective.entropy.adaptive": {"objective": {"entropy": {"coef": 0.01}}},
    "model.time_embedding": {"model": {"use_bidirectional_attention": True}},
    "model.local_layers": {"model": {"sliding_window": 8}},
    "objective.kl": {"objective": {"old_policy": "rollout"}},
}


@pytest.mark.slow
def test_every_example_is_valid_and_not_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_model_of_hugging_face(Path("qwen-small"))
    an_adapter_of_peft(Path("adapter-folder"))
    example, found = script("guide_pages").example, list(sections(RunConfig))
    # The required keys of each section and type.
    required = {(s.path, s.choice): [key for key in s.keys if key.default == "required"] for s in found}

    def run_with(section: ConfigSection, given: dict[str, Any], others: dict[str, Any]) -> RunConfig:
        kinds = [s for s in found if s.path == section.path and s.choice]
        kinds = [] if any(s.is_default for s in kinds) else sorted(kinds, key=lambda s: len(required[s.path, s.choice]))
        choice = section.choice or next((s.choice for s in kinds), None)
        value: Any = {"type": choice, **given} if choice else given
        places = section.path.split(".") if section.path else []
        while places:
            *places, last = places
            if last == "N":
                value = [value]
            elif last == "NAME":
                value = {"name": value}
            else:
                around = ConfigSection(".".join(places), None, True, "", ())
                beside = required.get((around.path, None), ())
                value = {key.name: parse_value(example(around, key)) for key in beside} | {last: value}
                # A section that not every type around it has needs the type.
                types = [s for s in found if s.path == around.path and s.choice and last in s.names]
                if types and not any(s.is_default for s in types):
                    value["type"] = types[0].choice
        return decode_run(ConfigSource(merge(value, merge(others, BESIDE.get(section.path, {})))), "example")

    for section in found:
        shared = required.get((section.path, None), [])
        of_section = [*shared, *(key for key in required[section.path, section.choice] if key not in shared)]
        needed = {key.name: parse_value(example(section, key)) for key in of_section}
        for key in section.keys:
            if (shown := example(section, key)) is None:
                continue
            value = parse_value(shown)
            if key.name == "source":
                assert is_import_path(value["type"])
                continue
            extra = NEEDED.get((section.path, section.choice, key.name), {})
            for rule in section.rules:
                alternatives = [one for one in section.keys if one.name in rule.keys and example(section, one)]
                if (
                    rule.text.startswith(("at least one of", "exactly one of"))
                    and key.name not in rule.keys
                    and alternatives
                ):
                    extra = {alternatives[0].name: parse_value(example(section, alternatives[0])), **extra}
            others = BESIDE.get(f"{section.path}.{key.name}", {})
            read = run_with(section, needed | extra | {key.name: value}, others)
            one_of_two = (section.choice, key.name) == ("drop_layers", "layers")
            if key.name not in (*needed, "shutdown_at_exit", "type") and not one_of_two:  # these have one valid value
                is_needed = any(key.name in rule.keys for rule in section.rules)  # maybe by the keys beside it
                same = shown == key.default if is_needed else read == run_with(section, needed | extra, others)
                assert not same, f"{section.path}.{key.name}: {value} is the default"


def test_every_example_belongs_to_a_key():
    guide, found = script("guide_pages"), list(sections(RunConfig))
    places = {path: path.partition(":")[0] for path in guide.EXAMPLES}  # some are of one type alone
    keys = {
        path: {key.name for s in found if s.path.startswith(place) for key in s.keys} for path, place in places.items()
    }
    assert {path: examples.keys() - keys[path] for path, examples in guide.EXAMPLES.items()} == {p: set() for p in keys}


def a_model_of_hugging_face(folder: Path) -> None:
    config = LlamaConfig() if folder.name.startswith("llama") else Qwen3Config()
    described = config_to_json(family_of_config(config), config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 99}))


def an_adapter_of_peft(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": "none", "r": 1, "lora_alpha": 1}')
    shapes = {"A": (1, 8), "B": (8, 1)}
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {f"{q_proj}.lora_{side}.weight": np.zeros(shape, np.float32) for side, shape in shapes.items()}
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in adapter.items()}
    write_safetensors(folder / "adapter_model.safetensors", infos, adapter.values())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_yaml_in_the_documents_is_valid(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("qwen-small", "llama-small"):  # folders that the documents mention
        a_model_of_hugging_face(Path(name))
    an_adapter_of_peft(Path("adapter-folder"))
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)):
        (tmp_path / f"{number}.yaml").write_text(block)
        source = load_yaml(tmp_path / f"{number}.yaml")
        if "scaling" in source.tree:
            assert plan_study(ConfigSource(source.tree), "document")
            continue
        read_config(tmp_path / f"{number}.yaml")
