"""A run on preference pairs: equal on several devices, learned, and shown by prepare."""

import functools
import json
import random
from collections.abc import Callable

import pytest
import yaml

from jaxlm.observe.trackers import read_jsonl
from tests.end_to_end.commands import Workplace, check_close


def start(place: Workplace) -> Workplace:
    """Pairs whose chosen completion repeats a word of the prompt, and whose rejected completion is another word."""
    chooser, words = random.Random(0), ["red", "blue", "green", "tall", "round"]
    for name, number in {"train": 64, "held_out": 16}.items():
        records = []
        for _ in range(number):
            word, other = chooser.sample(words, 2)
            records.append({"prompt": f"say {word}:", "chosen": f" {word} {word}", "rejected": f" {other}"})
        (place.folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = place.write()
    config = yaml.safe_load(path.read_text())
    config["data"] = {
        "type": "pairs",
        "train_urls": ["train.jsonl"],
        "validation_urls": ["held_out.jsonl"],
        "cache_dir": "cache",
        "vocab_size": 270,
    }
    config["evals"] = [{"type": "loss"}, {"type": "preference"}]
    config["trainer"]["compilation_cache_dir"] = str(place.cache / "xla")
    path.write_text(yaml.safe_dump(config))
    return place


@pytest.fixture(scope="module")
def whole(workplace) -> Callable[..., Workplace]:
    """The uninterrupted run, by number of devices."""

    @functools.cache
    def run(devices: int = 1) -> Workplace:
        place = start(workplace(devices))
        place.finish("--config_path", "run.yaml")
        return place

    return run


@pytest.mark.slow
def test_loss_and_preference_are_evaluated(whole):
    records = read_jsonl(whole().folder / "logs" / "run" / "metrics.jsonl")
    margins = [record["eval/preference/margin"] for record in records if "eval/preference/margin" in record]
    losses = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert losses[-1] < losses[0]
    assert margins[-1] != margins[0]
    assert 0 <= records[-1]["eval/preference/accuracy"] <= 1


@pytest.mark.soak  # one step on pairs is the same on eight devices in tests/engine/test_preferences.py
def test_eight_devices_train_like_one(whole):
    check_close(whole(8).losses(), whole(1).losses())


@pytest.mark.slow
def test_prepare_shows_both_halves_and_evaluate_reads_the_checkpoint(whole):
    whole = whole()
    shown = whole.finish("--config_path", "run.yaml", "--show_batch", "0", module="jaxlm.commands.prepare")
    assert shown.out.count(", chosen ---") == shown.out.count(", rejected ---") == 16
    measured = whole.finish("--checkpoint", "checkpoints/run", module="jaxlm.commands.evaluate")
    records = read_jsonl(whole.folder / "logs" / "run" / "metrics.jsonl")
    logged = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert json.loads(measured.out.splitlines()[-1])["loss"] == pytest.approx(logged[-1], rel=1e-6)


@pytest.mark.soak
def test_without_configuration_with_lora_and_a_tokenizer_of_words(workplace):
    """Bits per byte needs the bytes of each token, which a WordLevel tokenizer does not tell: they go, not the run."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    place = start(workplace())
    words = [*["say", "red", "blue", "green", "tall", "round", ":"], "<unk>", "<s>", "</s>"]
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(place.folder / "tokenizer.json"))
    for name in ("train", "held_out"):
        path = place.folder / f"{name}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        implied = [{side: r["prompt"] + r[side] for side in ("chosen", "rejected")} for r in records]
        path.write_text("".join(json.dumps(record) + "\n" for record in implied))
    config = yaml.safe_load((place.folder / "run.yaml").read_text())
    del config["data"]["vocab_size"]
    config["data"]["tokenizer"] = "tokenizer.json"
    lora = [{"type": "lora", "target": "attn|mlp", "rank": 4}]
    config["phases"] = [{"name": "a", "surgery": lora, "trainable": [r"\.[ab]$"], "objective": {"type": "dpo"}}]
    (place.folder / "run.yaml").write_text(yaml.safe_dump(config))
    shown = place.finish("--config_path", "run.yaml", "--show_batch", "0", module="jaxlm.commands.prepare")
    assert "in no record: prompt" in shown.out
    assert "⟧" in shown.out
    finished = place.finish("--config_path", "run.yaml", "--trainer.num_train_steps", "4")
    assert (
        "note: no bits per byte: data.tokenizer: bits per byte needs the number of bytes of each token" in finished.out
    )
    names = {name for record in read_jsonl(place.folder / "logs" / "run" / "metrics.jsonl") for name in record}
    assert "eval/loss" in names
    assert not [name for name in names if "bpb" in name]
    until = ["--trainer.until.metric", "eval/bpb", "--trainer.until.below", "1"]
    refused = place.run("--config_path", "run.yaml", "--trainer.id", "b", *until)
    assert refused.code == 2
    assert (
        "until.metric: 'eval/bpb' given for phase 'a', but the number of bytes of the tokens is unknown" in refused.err
    )
