"""Pretraining, SFT, DPO and GRPO as phases of one run, each with its own data, and a chat with the export."""

import io

import pytest
import yaml

from jaxlm.commands import chat
from jaxlm.observe.trackers import read_jsonl
from jaxlm.reading.recipes import config_file
from tests.end_to_end.commands import Workplace

STEPS = {"pretrain": 4, "sft": 12, "dpo": 8, "grpo": 6}
SIZES = {"seq_len": 128, "hidden_dim": 48, "intermediate_dim": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
END = sum(STEPS.values())


@pytest.fixture(scope="module")
def place(workplace) -> Workplace:
    """The recipe, of a small size, at its end."""
    place = workplace()
    recipe = yaml.safe_load(config_file("jaxlm:post_training/end_to_end.yaml").read_text())
    files = {"train_urls": [f"{place.corpus}/train"], "validation_urls": [f"{place.corpus}/validation"]}
    recipe["data"] |= files | {"cache_dir": "cache/text", "vocab_size": 400}
    recipe["model"] |= SIZES
    recipe["trainer"] |= {"train_batch_size": 4, "steps_per_eval": 6, "max_eval_batches": 2, "log_dir": "logs"}
    recipe["trainer"] |= {"compilation_cache_dir": str(place.cache / "xla")}
    recipe["trainer"]["checkpointer"] |= {"base_path": "checkpoints"}
    assert [phase["name"] for phase in recipe["phases"]] == list(STEPS)
    for phase in recipe["phases"]:
        phase["num_train_steps"] = STEPS[phase["name"]]
        if "data" in phase:
            is_sampled = phase["name"] == "grpo"
            phase["data"]["source"] |= {"num_train": 64, "num_validation": 0 if is_sampled else 16}
            phase["data"] |= {"max_new_tokens": 16, "group_size": 4, "long_prompts": "leave_out"} if is_sampled else {}
    (place.folder / "run.yaml").write_text(yaml.safe_dump(recipe))
    place.finish("--config_path", "run.yaml")
    return place


@pytest.mark.slow
def test_each_phase_minimizes_its_own_objective_on_its_own_data(place):
    records = read_jsonl(place.folder / "logs" / "run" / "metrics.jsonl")
    of_phase, first = {}, 0
    for name, steps in STEPS.items():
        of_phase[name] = [r for r in records if "train/loss" in r and first < r["step"] <= first + steps]
        assert len(of_phase[name]) == steps
        first += steps
    assert of_phase["dpo"][0]["train/loss"] == pytest.approx(0.693147, abs=1e-4)
    assert max(step["train/sampling/logp_diff_max"] for step in of_phase["grpo"]) < 1e-4
    for step in of_phase["grpo"]:
        assert 0 <= step["train/reward"] <= 1
        assert step["train/reward"] == pytest.approx(step["train/rewards/exact_match"])
        assert 0.2 <= step["train/curriculum/share"] < 1
    shown = {"dpo": "train/rewards/margins", "grpo": "train/clip_ratio/high_mean"}
    for phase, metric in shown.items():
        assert [name for name, steps in of_phase.items() if metric in steps[0]] == [phase]
    assert {r["step"] for r in records if "eval/rewards/accuracies" in r} == {18, 24}
    assert max(r["step"] for r in records if "eval/objective" in r) == 24  # rollouts have no validation data


@pytest.mark.slow
def test_the_export_chats_with_the_calculator(place, monkeypatch, capsys):
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 12 * 7?\n"))
    export = f"exports/end_to_end/step-{END}"
    assert chat.main(["--checkpoint", export, "--max_new_tokens", "8", "--tool", "calculator"]) == 0
    shown = capsys.readouterr().err
    assert shown.count("tokens/s]") == 1
    assert "no chat template" not in shown
