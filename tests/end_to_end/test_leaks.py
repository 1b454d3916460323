"""A run of 3,000 steps with evaluations, saves, exports and samples holds no more at its end than after a third."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.answers import write_model
from tests.end_to_end.census import FILE
from tests.end_to_end.commands import Workplace
from tests.end_to_end.test_dpo import DPO, pairs
from tests.end_to_end.test_dpo import start as start_dpo
from tests.end_to_end.test_sft import CHATS, SFT

STEPS, EVERY = 3000, 250
MB = 1 << 20
# What there may be more of: saves and flushes that are under way, and what caches of a fixed size hold: wandb's of its
# last 100 tables and Python's of the last 128 paths.
MORE = {"threads": 4, "descriptors": 6, "arrays": 250, "objects": 6000, "heap": 8 * MB, "anonymous": 32 * MB}


def pretraining(place: Workplace) -> dict[str, Any]:
    """An evaluation with samples every 20 steps, a save every second and every 50 steps, an export every 500."""
    config = yaml.safe_load(place.write().read_text())
    config["trainer"] |= {
        "num_train_steps": STEPS,
        "steps_per_eval": 20,
        "checkpointer": {
            "base_path": "checkpoints",
            "save_interval": "1s",
            "keep": [{"every": 50, "until": 500}, {"every": 500}],
        },
        "tracker": [
            {"type": "wandb", "project": "p", "mode": "offline", "save_code": False},
            {"type": "tensorboard"},
        ],
        "watch": {"interval": 10},
    }
    return config | {
        "evals": [{"type": "loss"}, {"type": "samples", "prompts": ["def ", "import "], "max_new_tokens": 12}],
        "hf_save_path": "exports",
        "hf_save_steps": 500,
    }


def dpo(place: Workplace) -> dict[str, Any]:
    """Pairs, with the answers of the reference."""
    start_dpo(place, DPO, pairs())
    config = yaml.safe_load((place.folder / "run.yaml").read_text())
    config["trainer"] |= {"num_train_steps": STEPS, "max_eval_batches": 2}
    config["trainer"]["checkpointer"] |= {"save_interval": "2s", "keep": [{"every": 100}]}
    return config


def sft(place: Workplace) -> dict[str, Any]:
    """Packed conversations, rendered by a template."""
    write_model(place.folder / "model")
    (place.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    config = yaml.safe_load(SFT.format(cache=place.cache))
    config["data"]["packing"] = {"type": "best_fit", "fill": "pad"}
    config["trainer"] |= {"num_train_steps": STEPS, "train_batch_size": 2, "log_dir": "logs"}
    return config


def counted(place: Workplace, config: dict[str, Any], every: int = EVERY) -> list[dict[str, Any]]:
    config["trainer"]["callbacks"] = [{"type": "tests.end_to_end.census:CensusConfig", "every": every}]
    (place.folder / "run.yaml").write_text(yaml.safe_dump(config))
    place.finish("--config_path", "run.yaml", WANDB_SILENT="true")
    return [json.loads(line) for line in (place.folder / FILE).read_text().splitlines()]


def check(counts: list[dict[str, Any]]) -> None:
    first, last = counts[STEPS // 3 // EVERY - 1], counts[-1]
    for name in ("programs", "children", "uncollectable"):
        assert last[name] == first[name], name
    for name, more in MORE.items():
        assert last[name] <= first[name] + more, name


@pytest.mark.soak
@pytest.mark.parametrize("made", [pretraining, sft, dpo])
def test_nothing_grows(workplace, made: Callable[[Workplace], dict[str, Any]]):
    place = workplace()
    check(counted(place, made(place)))


@pytest.mark.soak
def test_phases_leave_nothing_behind(workplace):
    """What lives as long as a phase is frozen, so that the collector does not scan it, and jax keeps compiled programs."""
    place, (num_phases, each) = workplace(), (10, 10)
    config = yaml.safe_load(place.write().read_text())
    del config["trainer"]["num_train_steps"]
    config["trainer"] |= {"steps_per_eval": each}
    config["evals"] = [{"type": "loss"}, {"type": "samples", "prompts": ["def "], "max_new_tokens": 4}]
    config["phases"] = [{"name": f"phase{n}", "num_train_steps": each} for n in range(num_phases)]
    counts = counted(place, config, each)
    assert len(counts) == num_phases
    third, last = counts[2], counts[-1]
    for name in ("objects", "anonymous"):
        assert last[name] <= third[name] + MORE[name], name
