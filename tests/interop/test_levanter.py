"""Different spellings in Levanter's published configurations are translated, or refused with advice."""

from pathlib import Path
from typing import Any

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.interop.levanter import config as levanter
from jaxlm.interop.levanter.config import from_levanter
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.yaml import ConfigSource


def read(tree: dict[str, Any]) -> tuple[RunConfig, list[str]]:
    source, notes = from_levanter(ConfigSource(tree))
    return decode_run(source, None), notes


# name: (Levanter's spelling, jaxlm's spelling, words in the notes)
SAME: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "a dataset by id in a mixture": (
        {"data": {"configs": {"g/a": {"id": "x/y"}, "b": {"train_urls": ["t"]}}, "train_weights": {"g/a": 1, "b": 1}}},
        {
            "data": {
                "configs": {"g.a": {"id": "x/y", "tags": ["g"]}, "b": {"train_urls": ["t"]}},
                "train_weights": {"g.a": 1, "b": 1},
            }
        },
        ["names with a slash"],
    ),
    "components": (
        {"data": {"components": {"m": {"source": {"type": "url", "train_urls": ["t"]}, "tags": ["x"]}}}},
        {"data": {"configs": {"m": {"train_urls": ["t"], "tags": ["x"]}}}},
        ["data.components"],
    ),
    "sources that are only evaluated on": (
        {
            "data": {
                "configs": {"a": {"train_urls": ["t"]}, "p/x": {"validation_urls": ["v"], "tags": ["y"]}},
                "train_weights": [[0, {"a": 1.0, "p/x": 0.0}]],
                "stop_strategy": "restart_strategy",
            }
        },
        {
            "data": {
                "configs": {"a": {"train_urls": ["t"]}, "p.x": {"validation_urls": ["v"], "tags": ["y", "p"]}},
                "train_weights": [[0, {"a": 1.0}]],
            }
        },
        ["slash"],
    ),
    "eras": ({"data": {"shuffle": 7}}, {"data": {"shuffle": {"type": "era", "era_length": 7}}}, ["data.shuffle"]),
    "lengths": (
        {"model": {"type": "gpt2", "max_seq_len": 64}, "train_seq_len": 64},
        {"model": {"type": "gpt2", "seq_len": 64}},
        ["model.max_seq_len", "train_seq_len"],
    ),
    "attention": (
        {"model": {"attn_backend": "vanilla", "flash_attention_block_size": 512, "gradient_checkpointing": "nested"}},
        {"model": {"attn_backend": "reference", "gradient_checkpointing": "full"}},
        ["flash_attention_block_size", "nested"],
    ),
    "attention without blocks": (
        {"model": {"use_flash_attention": False}},
        {"model": {"attn_backend": "reference"}},
        [],
    ),
    "what a family always has": (
        {"model": {"use_bias": False, "use_layer_norm_weight": True, "upcast_attn": False, "rope": {"factor": 1.0}}},
        {"model": {"rope": {}}},
        [],
    ),
    "what a family may have": (
        {"model": {"type": "gpt2", "use_bias": False, "upcast_attn": True}},
        {"model": {"type": "gpt2", "use_bias": False, "upcast_attn": True}},
        [],
    ),
    "biases": (
        {"model": {"type": "llama", "use_bias": True}},
        {"model": {"type": "llama", "attention_bias": True, "mlp_bias": True}},
        ["model.use_bias is read as attention_bias and mlp_bias; RMSNorms have no biases"],
    ),
    "weights of the reference": (
        {"model": {"reference_checkpoint": "a/b"}, "initialize_from_hf": True},
        {"initialize_from_hf": "a/b"},
        ["reference_checkpoint"],
    ),
    "a tracker by its old name": (
        {"trainer": {"wandb": {"project": "p"}}},
        {"trainer": {"tracker": {"type": "wandb", "project": "p"}}},
        ["trainer.wandb"],
    ),
    "both spellings of a tracker": (
        {"trainer": {"wandb": {"project": "p", "tags": ["t"]}, "tracker": {"project": "p", "entity": "e"}}},
        {"trainer": {"tracker": {"type": "wandb", "project": "p", "tags": ["t"], "entity": "e"}}},
        ["trainer.wandb"],
    ),
    "the old spelling beside another tracker": (
        {"trainer": {"wandb": {"project": "p"}, "tracker": [{"type": "tensorboard"}]}},
        {"trainer": {"tracker": [{"type": "tensorboard"}, {"type": "wandb", "project": "p"}]}},
        ["trainer.wandb"],
    ),
    "a cache that an including file should name": (
        {"data": {"train_urls": ["t"], "cache_dir": None}},
        {"data": {"train_urls": ["t"]}},
        [],
    ),
    "axes of a mesh": (
        {
            "trainer": {
                "mesh": {
                    "axes": {"data": -1},
                    "batch_axis_name": "batch",
                    "compute_mapping": {"token": ["replica", "data"], "token_repeat": "data", "batch": "data"},
                }
            }
        },
        {"trainer": {"mesh": {"axes": {"data": -1}, "compute_mapping": {"batch": "data"}}}},
        [
            "mapping.token is ignored",
            "mapping.token_repeat is ignored",
            "mesh.batch_axis_name is read as trainer.batch_axis",
        ],
    ),
    "LoRA": (
        {
            "model": {"type": "gpt2"},
            "lora": {"r": 32, "alpha": 16.0, "target_modules": ["c_attn", "up_proj"], "zero_init_b": True},
            "merged_hf_save_path": "merged",
            "merged_hf_upload": "me/merged",
            "trust_remote_code": False,
        },
        {
            "model": {"type": "gpt2"},
            "hf_save_path": "merged",
            "hf_upload": "me/merged",
            "phases": [
                {
                    "name": "lora",
                    "surgery": [
                        {"type": "lora", "target": "(q_proj|k_proj|v_proj|up_proj)$", "rank": 32, "alpha": 16.0}
                    ],
                    "trainable": [r"\.[ab]$"],
                }
            ],
        },
        [
            "lora is read as phases with a surgery of type lora",
            "merged_hf_save_path",
            "merged_hf_upload is read as hf_upload",
        ],
    ),
    "supervised fine-tuning": (
        {
            "dataset_type": "chat_jsonl",
            "chat_train_urls": ["c.jsonl"],
            "messages_field": "turns",
            "supervised_data": {"cache_dir": "tokens"},
            "tokenizer": "bytes",
            "max_seq_len": 64,
            "model": {"type": "gpt2", "seq_len": 64},
        },
        {
            "data": {
                "train_urls": ["c.jsonl"],
                "format": {"type": "chat", "messages_field": "turns"},
                "cache_dir": "tokens",
                "tokenizer": "bytes",
            },
            "model": {"type": "gpt2", "seq_len": 64},
        },
        ["chat_train_urls", "dataset_type", "supervised_data.cache_dir", "tokenizer", "max_seq_len"],
    ),
    "trackers that are always on": (
        {"trainer": {"tracker": [{"type": "json_logger"}, {"type": "tensorboard"}]}},
        {"trainer": {"tracker": [{"type": "tensorboard"}]}},
        ["json_logger"],
    ),
    "a profile": (
        {"trainer": {"profiler": True, "profiler_start_step": 7, "profiler_perfetto_link": False}},
        {"trainer": {"profiler": {"start_step": 7}}},
        [],
    ),
    "sophia by its own keys": (
        {
            "optimizer": {
                "type": "sophia-h",
                "learning_rate": 0.85e-3,
                "gamma": 0.02,
                "update_interval": 5,
                "rng_seed": 1,
            }
        },
        {
            "optimizer": {
                "type": "sophia-h",
                "learning_rate": 8.5e-4,
                "gamma": 0.02,
                "update_interval": 5,
                "rng_seed": 1,
            }
        },
        [],
    ),
    "Adam-mini": (
        {"optimizer": {"type": "mini", "learning_rate": 1e-3, "nesterov": False}},
        {"optimizer": {"type": "adam-mini", "learning_rate": 1e-3}},
        ["mini is read as adam-mini"],
    ),
    "cautious updates": (
        {"optimizer": {"type": "cautious", "learning_rate": 1e-3, "gamma": 0.025}},
        {"optimizer": {"type": "adam", "learning_rate": 1e-3, "beta1": 0.95, "cautious": True}},
        ["optimizer.gamma is ignored", "adam with cautious"],
    ),
    "a part of the data": (
        {
            "data": {
                "configs": {"g/a": {"id": "x/y"}},
                "max_train_batches": {"g/a": 3},
                "num_validation_sequences": {"g/a": 64},
                "ignore_token_id": 5,
            }
        },
        {
            "data": {
                "configs": {"g.a": {"id": "x/y", "tags": ["g"]}},
                "max_train_batches": {"g.a": 3},
                "num_validation_sequences": {"g.a": 64},
                "ignore_token_id": 5,
            }
        },
        ["names with a slash"],
    ),
    "entropies": (
        {"log_entropy": True},
        {"evals": [{"type": "loss"}, {"type": "entropy"}]},
        ["log_entropy is read as evals of type entropy"],
    ),
    "fp8": (
        {"trainer": {"mp": "f32", "quantization": {"fp8": True, "int8": False, "targets": None}}},
        {
            "trainer": {"mp": "f32"},
            "phases": [{"name": "train", "surgery": [{"type": "fp8", "min_features": 16}]}],
        },
        ["trainer.quantization is read as phases with a surgery of type fp8, whose scales"],
    ),
    "no fp8": ({"trainer": {"quantization": {"fp8": False}}}, {"trainer": {}}, []),
    "no profile": ({"trainer": {"profiler": False, "profiler_num_steps": 7}}, {}, []),
    "what asks for nothing": (
        {
            "optimizer": {"cooldown": None, "haps": None},
            "trainer": {"quantization": None, "wandb": None},
            "eval_harness": None,
            "eval_harness_steps": 50,
        },
        {"optimizer": {}, "trainer": {}},
        ["eval_harness_steps is ignored: eval_harness is not set"],
    ),
    "a harness": (
        {
            "eval_harness": {
                "task_spec": [
                    "mmlu",
                    {"task": "arc_easy", "num_fewshot": 5},
                    {"task": "piqa", "task_alias": "p", "description": None},
                ],
                "max_examples": 32,
                "log_samples": True,
                "apply_chat_template": False,
                "generation_kwargs": {"max_gen_toks": 256, "temperature": 0.0},
            },
            "eval_harness_steps": 50,
        },
        {
            "evals": [
                {"type": "loss"},
                {"type": "harness", "tasks": ["mmlu", "piqa"], "limit": 32},
                {"type": "harness", "tasks": ["arc_easy"], "num_fewshot": 5, "limit": 32},
            ]
        },
        ["evals of type harness", "log_samples", "task_alias", "steps_per_eval"],
    ),
    "a harness beside evals": (
        {"eval_harness": {"task_spec": ["piqa"]}, "evals": []},
        {"evals": [{"type": "harness", "tasks": ["piqa"]}]},
        ["evals of type harness"],
    ),
    "prompts to evaluate on": (
        {
            "supervised_data": {"x/m": {"validation_urls": ["m"], "tags": ["e"], "input_field": "question"}},
            "data": {"configs": {"a": {"train_urls": ["t"]}}, "train_weights": {"a": 1.0}},
        },
        {
            "data": {
                "configs": {
                    "a": {"train_urls": ["t"]},
                    "x.m": {
                        "validation_urls": ["m"],
                        "tags": ["e", "x"],
                        "format": {"type": "supervised", "input_field": "question"},
                    },
                },
                "train_weights": {"a": 1.0},
            }
        },
        ["supervised_data", "slash"],
    ),
    "other names": (
        {
            "z_loss_weight": 1e-4,
            "trainer": {"model_ici_axis_size": 2},
            "data": {"cache_options": {"batch_size": 9}},
        },
        {"objective": {"type": "next_token", "z_loss_weight": 1e-4}, "trainer": {"model_axis_size": 2}},
        ["cache_options", "z_loss_weight", "model_ici_axis_size"],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_levanter_spellings_give_the_same_configuration(name):
    theirs, ours, words = SAME[name]
    config, notes = read(theirs)
    assert config == decode_run(ConfigSource(ours), None)
    assert len(notes) == len(words)
    for word in words:
        assert any(word in note for note in notes), notes


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
    page = (Path(__file__).parents[2] / "docs" / "from-levanter.md").read_text(encoding="utf-8")
    assert [key for key in getattr(levanter, table) if f"`{key}`" not in page] == []
