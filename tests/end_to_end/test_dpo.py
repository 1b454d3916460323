"""Runs of `dpo`: what they learn, killed and resumed with their reference, and its cached answers."""

import functools
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from jaxlm.observe.trackers import read_jsonl
from tests.end_to_end.commands import Workplace

LETTERS = "abcdefghijklmnop"
DPO = {
    "data": {"type": "pairs"},
    "objective": {"type": "dpo"},
    "evals": [{"type": "objective"}, {"type": "preference"}],
}


def pairs() -> list[dict[str, Any]]:
    """The chosen completion repeats the letter of the prompt, and the rejected completion is another letter."""
    every = list(itertools.permutations(LETTERS, 2))
    random.Random(0).shuffle(every)
    return [{"prompt": f"{a}:", "chosen": f" {a}", "rejected": f" {b}"} for a, b in every]


def start(place: Workplace, sections: dict[str, Any], records: list[dict[str, Any]]) -> Workplace:
    for name, part in {"train": records[:192], "held_out": records[192:]}.items():
        (place.folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    path = place.write()
    config = yaml.safe_load(path.read_text())
    files = {"train_urls": ["train.jsonl"], "validation_urls": ["held_out.jsonl"]}
    config |= sections | {"data": sections["data"] | files | {"cache_dir": "cache", "vocab_size": 280}}
    config["model"] |= {"seq_len": 8, "hidden_dim": 64}
    config["optimizer"] = {"learning_rate": 3.0e-3, "warmup": 2}
    trainer = {"num_train_steps": 60, "train_batch_size": 32, "steps_per_eval": 20, "max_eval_batches": None}
    config["trainer"] |= trainer | {"compilation_cache_dir": str(place.cache / "xla")}
    path.write_text(yaml.safe_dump(config))
    return place


def finish(place: Workplace, *options: str) -> str:
    finished = place.finish("--config_path", "run.yaml", *options)
    return finished.out


def records_of(place: Workplace, run_id: str = "run") -> list[dict[str, Any]]:
    return read_jsonl(place.folder / "logs" / run_id / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(workplace) -> Callable[[], tuple[Workplace, str]]:
    """The uninterrupted run of `dpo`, and its output."""

    @functools.cache
    def run() -> tuple[Workplace, str]:
        place = start(workplace(), DPO, pairs())
        return place, finish(place)

    return run


@pytest.mark.soak
def test_copies_beat_random_letters(whole):
    place, shown = whole()
    steps = [record for record in records_of(place) if "train/loss" in record]
    margins = [record["train/rewards/margins"] for record in steps]
    means = [sum(margins[at : at + 10]) / 10 for at in range(0, 60, 10)]
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[0]["train/rewards/margins"] == pytest.approx(0, abs=1e-6)  # rounding decides the accuracy
    assert steps[-1]["train/loss"] < 0.2
    assert steps[-1]["train/rewards/accuracies"] >= 0.98
    assert means[-1] > 1
    assert means == sorted(means)
    evaluated = [record for record in records_of(place) if "eval/rewards/accuracies" in record]
    assert [record["step"] for record in evaluated] == [20, 40, 60]
    assert evaluated[-1]["eval/rewards/accuracies"] >= 0.9
    assert evaluated[-1]["eval/rewards/margins"] > 1
    assert evaluated[-1]["eval/objective"] < evaluated[0]["eval/objective"] < 0.693
    assert evaluated[-1]["eval/preference/accuracy"] >= 0.9
    assert "eval/rewards/accuracies 0." in shown or "eval/rewards/accuracies 1." in shown
    assert "  accuracy " in shown


@pytest.mark.soak
def test_a_resumed_run_has_the_reference_of_its_start(whole, workplace):
    place = start(workplace(), DPO, pairs())
    place.die("--config_path", "run.yaml", at="first phase")
    assert "resuming" in finish(place)
    assert place.losses() == whole()[0].losses()
    digest = place.digest("step-60")
    assert digest == whole()[0].digest("step-60")
    assert any(path.startswith("slots.objective.weights") for path in digest)


@pytest.mark.soak
def test_a_reference_in_memory_in_refs_or_on_the_disk_gives_the_same_losses(whole):
    place, _ = whole()
    begin = ("--trainer.initialize_from", "checkpoints/run/step-20", "--trainer.num_train_steps", "10")
    refs = "{base: {type: checkpoint, path: checkpoints/run/step-20, dtype: float32}}"
    other = ("--refs", refs, "--objective.reference", "base")
    cached = (*other, "--objective.cache", "true", "--evals", "[{type: preference}]")
    outputs = {}
    for name, options in {"initial": (), "refs": other, "cached": cached, "again": cached}.items():
        outputs[name] = finish(place, *begin, "--trainer.id", name, *options)
    expected = [float.fromhex(loss) for loss in place.losses("initial").values()]
    for name in ("refs", "cached", "again"):
        found = [float.fromhex(loss) for loss in place.losses(name).values()]
        assert found == pytest.approx(expected, abs=1e-6), name
    assert "annotating" in outputs["cached"]
    assert "refs.base: " not in outputs["again"]
