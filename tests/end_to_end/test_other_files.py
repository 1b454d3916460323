"""Processes, or two starts of a run, whose copies of files differ are told before they train."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest

from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.families.llama import LlamaConfig
from tests.answers import TEMPLATE, instructions, write_tokenizer
from tests.end_to_end.commands import Workplace, end_of
from tests.engine.helpers import one_device
from tests.ports import reserved_port

MODEL = LlamaConfig(seq_len=64, hidden_dim=32, intermediate_dim=64, num_layers=1, num_heads=4, num_kv_heads=2)
CONFIG = """
data:
  train_urls: [chats.jsonl]
  validation_urls: [held_out.jsonl]
  cache_dir: cache
  tokenizer: base
  format: {type: chat}
initialize_from_hf: base
use_hf_model_config: true
trainer: {num_train_steps: 4, train_batch_size: 8, steps_per_eval: 2, max_eval_batches: null, log_dir: logs}
"""
CHATS = [
    {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["response"]}]}
    for r in instructions()
]
OTHER_TEMPLATE = TEMPLATE.replace("<|end|>", " indeed<|end|>", 1)


def write_base(folder: Path, seed: int) -> None:
    write_tokenizer(folder)
    size = load_tokenizer(str(folder)).vocab_size
    model = MODEL.build(hax.Axis("vocab", size), key=jax.random.key(seed))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    save_folder(folder, model, MODEL, one_device(), dtype=np.float32, files=files, special_ids={})


def write_chats(path: Path, chats: list[dict]) -> None:
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def fill(folder: Path) -> None:
    write_base(folder / "base", 0)
    write_chats(folder / "chats.jsonl", CHATS * 8)
    write_chats(folder / "held_out.jsonl", CHATS * 4)
    (folder / "run.yaml").write_text(CONFIG)


def of_two_machines(workplace: Callable[[int], Workplace], change: Callable[[Path], None]) -> list:
    """The ends of two processes, the second of which runs in a folder where something differs."""
    first = workplace(1)
    fill(first.folder)
    second = replace(first, folder=first.folder.with_name(f"{first.folder.name}-second"))
    shutil.copytree(first.folder, second.folder)
    change(second.folder)
    where = "--trainer.distributed."
    common = ("--config_path", "run.yaml", "--trainer.checkpointer.base_path", str(first.folder / "checkpoints"))
    common = (*common, f"{where}coordinator_address", f"127.0.0.1:{reserved_port()}", f"{where}num_processes", "2")
    started = [place.start(*common, f"{where}process_id", str(number)) for number, place in enumerate([first, second])]
    return [end_of(process) for process in started]


def other_weights(folder: Path) -> None:
    shutil.rmtree(folder / "base")
    write_base(folder / "base", 1)


def other_template(folder: Path) -> None:
    (folder / "base" / "chat_template.jinja").write_text(OTHER_TEMPLATE)


def less_validation(folder: Path) -> None:
    write_chats(folder / "held_out.jsonl", CHATS[:8])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_weights, "weights base/model.safetensors: "),
        (other_template, "tokenizer base/chat_template.jinja: "),
        (less_validation, "data, validation text, files: "),
    ],
)
def test_processes_whose_files_differ_end_before_they_train(workplace, change, named):
    for one in of_two_machines(workplace, change):
        assert one.code == 2, one
        assert "Traceback" not in one.err
        assert named in one.err
        assert "on process 0" in one.err
        assert "step 1" not in one.out


@pytest.mark.slow
def test_processes_with_the_same_files_in_other_folders_train(workplace):
    assert [one.code for one in of_two_machines(workplace, lambda folder: None)] == [0, 0]


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_chat_template(workplace):
    """Even if the cache that was made with the first is gone."""
    place = workplace(1)
    fill(place.folder)
    start = ("--config_path", "run.yaml", "--trainer.checkpointer.base_path", "checkpoints")
    place.finish(*start)
    other_template(place.folder)
    shutil.rmtree(place.folder / "cache")
    refused = place.run(*start, "--trainer.num_train_steps", "6")
    assert refused.code == 2, refused
    assert "chat_template" in refused.err
    assert "--trainer.allow_changes '[tokenizer]'" in refused.err
    place.finish(*start, "--trainer.num_train_steps", "6", "--trainer.allow_changes", "[tokenizer]")
