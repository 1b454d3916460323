"""Processes, or two starts of a run, whose copies of files differ are told before they train."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest

from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.folder import save_folder
from jaxlm.interop.hf.safetensors_file import TensorInfo, write_safetensors
from tests.answers import TEMPLATE, instructions, write_tokenizer
from tests.end_to_end.commands import Workplace, end_of
from tests.engine.helpers import one_device
from tests.ports import reserved_port
from tests.tiers import one_of

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
FROM_BASE = "initialize_from_hf: base\nuse_hf_model_config: true\n"
MORE = """
evals:
  - {type: loss}
  - {type: cases, file: cases.jsonl, reference: null}
phases: [{name: lora, num_train_steps: 4, surgery: [{type: lora, from_peft: adapters}]}]
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


def write_adapters(folder: Path, seed: int) -> None:
    """Adapters as PEFT writes them, for the queries of the first layer."""
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    rng, name = np.random.default_rng(seed), "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{name}.lora_A.weight": (2, 32), f"{name}.lora_B.weight": (32, 2)}
    infos = {key: TensorInfo(shape, np.dtype(np.float32)) for key, shape in shapes.items()}
    arrays = (rng.normal(size=shape) for shape in shapes.values())
    write_safetensors(folder / "adapter_model.safetensors", infos, arrays)


def write_questions(folder: Path, answer: int = 4) -> None:
    (folder / "cases.jsonl").write_text(json.dumps({"id": "sum", "prompt": "2+2=", "answer": answer}) + "\n")


def fill(folder: Path) -> None:
    write_base(folder / "base", 0)
    write_chats(folder / "chats.jsonl", CHATS * 8)
    write_chats(folder / "held_out.jsonl", CHATS * 4)
    (folder / "run.yaml").write_text(CONFIG)


def fill_with_more(folder: Path) -> None:
    """A run that also reads adapters and the files of evaluations."""
    fill(folder)
    write_adapters(folder / "adapters", 0)
    write_questions(folder)
    (folder / "run.yaml").write_text(CONFIG.replace("num_train_steps: 4, ", "") + MORE)


def of_two_machines(place: Workplace, change: Callable[[Path], None], *arguments: str) -> list:
    """The ends of two processes, the second of which runs in a copy of the folder where something differs."""
    first = place
    second = replace(first, folder=first.folder.with_name(f"{first.folder.name}-second"))
    shutil.copytree(first.folder, second.folder)
    change(second.folder)
    where = "--trainer.distributed."
    common = (
        "--config_path",
        "run.yaml",
        *arguments,
        "--trainer.checkpointer.base_path",
        str(first.folder / "checkpoints"),
    )
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


def other_adapters(folder: Path) -> None:
    write_adapters(folder / "adapters", 1)


CHANGES = [
    (fill, other_weights, "base/model.safetensors: "),
    (fill, other_template, "base/chat_template.jinja: "),
    (fill, lambda folder: (folder / "base" / "generation_config.json").unlink(), "base/generation_config.json: "),
    (fill, less_validation, "data, validation text, files: "),
    (fill_with_more, other_adapters, "adapters/adapter_model.safetensors: "),
]


def check_refused(ends: list, named: str) -> None:
    for one in ends:
        assert one.code == 2, one
        assert "Traceback" not in one.err
        assert named in one.err
        assert "on process 0" in one.err
        assert "step 1" not in one.out


@pytest.mark.slow
@pytest.mark.parametrize(("filled", "change", "named"), one_of(CHANGES), ids=[named for *_, named in CHANGES])
def test_processes_whose_files_differ_end_before_they_train(workplace, filled, change, named):
    place = workplace(1)
    filled(place.folder)
    check_refused(of_two_machines(place, change), named)


@pytest.mark.soak
def test_processes_whose_copies_of_a_checkpoint_differ_end_before_they_train(workplace):
    place = workplace(1)
    fill(place.folder)
    sizes = (
        "{type: llama, seq_len: 64, hidden_dim: 32, intermediate_dim: 64, num_layers: 1, num_heads: 4, num_kv_heads: 2}"
    )
    (place.folder / "run.yaml").write_text(CONFIG.replace(FROM_BASE, f"model: {sizes}\n"))
    for folder, seed in (("start", "0"), ("other", "1")):
        first = ("--trainer.num_train_steps", "1", "--trainer.log_dir", folder, "--trainer.seed", seed)
        place.finish("--config_path", "run.yaml", *first, "--trainer.checkpointer.base_path", folder)

    def other_checkpoint(folder: Path) -> None:
        shutil.rmtree(folder / "start")
        (folder / "other").rename(folder / "start")

    start = ("--trainer.initialize_from", "start/run")
    check_refused(of_two_machines(place, other_checkpoint, *start), "the checkpoint that the run starts from: ")


@pytest.mark.slow
@pytest.mark.parametrize("filled", one_of([fill, fill_with_more]))
def test_processes_with_the_same_files_in_other_folders_train(workplace, filled):
    check_same_files(workplace(1), filled, ("cases.jsonl",) if filled is fill_with_more else ())


def check_same_files(place: Workplace, filled: Callable[[Path], None], read_by_one: Sequence[str]) -> None:
    """What only process 0 reads may be missing elsewhere. Args: read_by_one: such files."""
    filled(place.folder)

    def fewer(folder: Path) -> None:
        for name in read_by_one:
            (folder / name).write_text("{}")

    assert [one.code for one in of_two_machines(place, fewer)] == [0, 0]


@pytest.mark.soak
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


@pytest.mark.soak
def test_a_run_says_once_which_files_of_its_evaluations_have_changed(workplace):
    def change(folder: Path) -> None:
        write_questions(folder, answer=5)

    check_changed_files(workplace(1), fill_with_more, change, ["evals: type cases: cases: file: "])


def check_changed_files(
    place: Workplace, filled: Callable[[Path], None], change: Callable[[Path], None], named: Sequence[str]
) -> None:
    """Moves the folder of a run, and changes files. Args: named: what the next start says of those that `change` changes."""
    filled(place.folder)
    moved = replace(place, folder=place.folder.with_name(f"{place.folder.name}-moved"))
    mark = "changed since the last start: "

    def changes(place: Workplace, num_steps: int) -> list[str]:
        steps = ("--phases.0.num_train_steps", str(num_steps))
        end = place.finish("--config_path", "run.yaml", "--trainer.checkpointer.base_path", "checkpoints", *steps)
        lines = [line.removeprefix(mark) for line in end.out.splitlines() if line.startswith(mark)]
        return [line for line in lines if not line.startswith(("phases.0", "the learning-rate"))]

    assert changes(place, 1) == []
    place.folder.rename(moved.folder)
    assert changes(moved, 2) == []
    less_validation(moved.folder)
    shutil.rmtree(moved.folder / "cache")
    change(moved.folder)
    lines = changes(moved, 3)
    for line, text in zip(lines, ("data, validation text, files: ", *named), strict=True):
        assert line.startswith(text)
        assert line.endswith(
            "(changes what follows: evaluations, and what depends on them, are not comparable with earlier ones)"
        )
    assert changes(moved, 4) == []
