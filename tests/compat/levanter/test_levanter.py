"""Different spellings in Levanter's published configurations are translated, or refused with advice."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlm.compat.levanter import from_levanter as levanter
from jaxlm.compat.levanter.from_levanter import from_levanter
from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.yaml import ConfigSource

VECTORS = Path(__file__).parents[2] / "vectors"


def read(tree: dict[str, Any]) -> tuple[RunConfig, list[str]]:
    source, notes = from_levanter(ConfigSource(tree))
    return decode_run(source, None), notes


SAME: dict[str, dict[str, Any]] = yaml.safe_load((VECTORS / "levanter_spellings.yaml").read_text())


@pytest.mark.parametrize("name", SAME)
def test_levanter_spellings_give_the_same_configuration(name):
    case = SAME[name]
    config, notes = read(case["levanter"])
    assert config == decode_run(ConfigSource(case["jaxlm"]), None)
    words = case.get("notes", [])
    assert len(notes) == len(words)
    for word in words:
        assert any(word in note for note in notes), notes


def test_a_source_with_only_a_cache_is_not_left_out():
    sources = {"a": {"source": {"type": "url", "train_urls": ["x.jsonl"]}}, "b": {"cache_dir": "gs://c/b"}}
    with pytest.raises(
        ConfigError, match=r"data\.configs\.b: a source without text, .* caches of other programs are not"
    ):
        read({"data": {"components": sources}})[0].data.corpus.check_not_empty()
    read({"data": {"components": {**sources, "b": {"validation_urls": ["v"]}}}})[0].data.corpus.check_not_empty()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two projects": (
        {"trainer": {"wandb": {"project": "p"}, "tracker": {"project": "q"}}},
        "trainer.wandb.project: 'p' given, but trainer.tracker.project is 'q'. Remove one",
    ),
    "a tracker that is no section": ({"trainer": {"wandb": True}}, "trainer.wandb: True given; a section expected"),
    "LoRA that is no section": ({"lora": 8}, "lora: 8 given; a section expected"),
    "other LoRA": ({"lora": {"zero_init_b": False}}, "lora.zero_init_b: False given; surgeries of type lora do not"),
    "LoRA of no names": ({"lora": {"target_modules": [1]}}, r"lora.target_modules: \[1\] given; names of layers"),
    "adapters as they are trained": ({"peft_save_path": "p"}, "peft_save_path: 'p' given.*jaxlm convert to-hf"),
    "int8": ({"trainer": {"quantization": {"fp8": True, "int8": True}}}, r"quantization\.int8: True given.*does not"),
    "fp8 in no section": (
        {"trainer": {"quantization": "fp8"}},
        r"trainer\.quantization: 'fp8' given; a section expected",
    ),
    "fp8 and LoRA": (
        {"lora": {"r": 4}, "trainer": {"quantization": {"fp8": True}}},
        r"quantization\.fp8: true given together with phases or lora. Add \{type: fp8\} to the surgery",
    ),
    "no tasks": ({"eval_harness": {"max_examples": 3}}, r"eval_harness: .*task_spec: \[arc_easy\]"),
    "a task's words": (
        {"eval_harness": {"task_spec": ["a", {"task": "b", "description": "Choose."}]}},
        r"eval_harness\.task_spec\.1\.description: 'Choose\.' given; .*of your own",
    ),
    "a task twice": (
        {"eval_harness": {"task_spec": ["a", {"task": "a", "num_fewshot": 5, "task_alias": "a5"}]}},
        r"task_spec\.1: a is listed twice",
    ),
    "chats": ({"eval_harness": {"task_spec": ["a"], "apply_chat_template": True}}, r"apply_chat_template: True given"),
    "texts": ({"eval_harness": {"task_spec": ["a"], "generation_kwargs": {"n": 4}}}, r"generation_kwargs: \{'n': 4\}"),
    "no section of texts": (
        {"eval_harness": {"task_spec": ["a"], "generation_kwargs": ["x"]}},
        r"generation_kwargs: \['x'\] given; a section expected",
    ),
    "no list of evals": ({"eval_harness": {"task_spec": ["a"]}, "evals": None}, r"evals: None given .*a list expected"),
    "one eval": ({"eval_harness": {"task_spec": ["a"]}, "evals": {"type": "loss"}}, r"evals: .* a list expected"),
    "cooldown": ({"optimizer": {"cooldown": 0.2}}, r"optimizer\.cooldown: .*optimizer\.decay"),
    "both names": ({"train_length": 64, "model": {"seq_len": 32}}, r"train_length: same as model\.seq_len.*32"),
    "norms": ({"model": {"type": "gpt2", "use_layer_norm_weight": False}}, r"norm_weight: false .* always has true"),
    "prompts beside one source": (
        {"supervised_data": {"mmlu": {"validation_urls": ["m"]}}, "data": {"train_urls": ["t"]}},
        r"supervised_data: .*in addition to those of data\.configs",
    ),
    "prompts from the hub": (
        {"supervised_data": {"m": {"validation_urls": ["m"], "hf_dataset_name": "a/b"}}, "data": {"configs": {}}},
        r"supervised_data\.m\.hf_dataset_name: 'a/b' given",
    ),
    "prompts by a source's name": (
        {"supervised_data": {"a": {"validation_urls": ["m"]}}, "data": {"configs": {"a": {"train_urls": ["t"]}}}},
        r"supervised_data\.a: data\.configs has a source of the same name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_levanter_keys_say_what_to_do(name):
    tree, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read(tree)


@pytest.mark.parametrize("table", ["_RENAMED", "_IGNORED", "_UNSUPPORTED", "_ALWAYS"])
def test_every_translated_key_is_in_the_documentation(table):
    page = (Path(__file__).parents[3] / "docs" / "from-levanter.md").read_text(encoding="utf-8")
    assert [key for key in getattr(levanter, table) if f"`{key}`" not in page] == []
