"""Configurations that Levanter publishes train for two steps: with other text, and with sizes given on the command line."""

import json
from typing import Any

import pytest
import yaml

from tests.answers import instructions, write_tokenizer
from tests.compat.levanter.test_levanter_published import PLANNED, published

SMALLER = {"hidden_dim": 32, "num_layers": 2, "num_heads": 4, "seq_len": 32}
ONLY_WITH_GATES = {"intermediate_dim": 64, "num_kv_heads": 2}
SHORTER = {
    "num_train_steps": 2,
    "train_batch_size": 8,
    "per_device_parallelism": -1,
    "per_device_eval_parallelism": -1,
    "steps_per_eval": 2,
    "max_eval_batches": 1,
    "require_accelerator": "false",
    "tracker": "[]",
    "log_dir": "logs",
    "checkpointer.base_path": "checkpoints",
}


def with_other_text(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with local text and tokenizer, without tasks of the harness and weights of the hub."""
    data = config["data"]
    for source in data.get("configs", {"": data}).values():
        is_trained = {"id", "train_urls"} & source.keys()
        is_chat = source.get("format", {}).get("type") == "chat"
        for key in ("id", "train_urls", "validation_urls", "cache_dir"):
            source.pop(key, None)
        source["train_urls" if is_trained else "validation_urls"] = ["chats.jsonl" if is_chat else "text.txt"]
    config["data"] |= {"cache_dir": "cache", "tokenizer": "tokenizer"}
    return {key: value for key, value in config.items() if key not in ("eval_harness", "initialize_from_hf")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if number == 0 else pytest.mark.soak) for number, name in enumerate(PLANNED)],
)
def test_starts_and_trains(workplace, tmp_path_factory, name):
    place, config = workplace(), with_other_text(published(name))
    write_tokenizer(place.folder / "tokenizer")
    answers = [(record["prompt"], record["response"]) for record in instructions()]
    chats = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in answers]
    (place.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats * 8))
    (place.folder / "text.txt").write_text("\n".join(f"{a} {b}" for a, b in answers) * 8)
    (place.folder / "run.yaml").write_text(yaml.safe_dump(config))
    sizes = SMALLER if config["model"]["type"] == "gpt2" else SMALLER | ONLY_WITH_GATES
    options = {f"model.{key}": value for key, value in sizes.items()}
    options |= {f"trainer.{key}": value for key, value in SHORTER.items()}
    options["trainer.compilation_cache_dir"] = tmp_path_factory.getbasetemp() / "xla"
    options |= {"hf_save_path": "exports"} if config.get("hf_save_path") else {}
    place.finish("--config_path", "run.yaml", *(str(x) for key, value in options.items() for x in (f"--{key}", value)))
    assert sorted(place.losses(config["trainer"].get("id", "run"))) == [1, 2]
