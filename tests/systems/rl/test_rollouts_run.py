"""GRPO on responses that are sampled in training, through the real command: it learns, on any devices, through a kill."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import yaml

import jaxlm
from jaxlm.observe.trackers import read_jsonl
from tests.end_to_end.commands import Workplace
from tests.end_to_end.successor import DIGITS, FIRST, prompt_ids, write_task

GRPO = {"type": "grpo", "old_policy": "rollout", "kl": None}
ROLLOUTS = {
    "type": "rollouts",
    "train_urls": ["prompts.jsonl"],
    "tokenizer": "tokenizer",
    "cache_dir": "cache",
    "group_size": 8,
    "max_new_tokens": 3,
    "rewards": [{"type": "function", "function": "tests.end_to_end.successor:right", "name": "right"}],
}


def start(place: Workplace, steps: int, **sections: dict[str, Any]) -> Workplace:
    """Args: sections: keys that are changed, by section."""
    write_task(place.folder)
    path = place.write()
    config = yaml.safe_load(path.read_text())
    config |= {
        "data": dict(ROLLOUTS),
        "objective": dict(GRPO),
        "optimizer": {"learning_rate": 3.0e-3, "warmup": 0, "min_lr_ratio": 1.0},
    }
    config["model"] |= {"seq_len": 16, "hidden_dim": 64, "num_heads": 2}
    del config["trainer"]["max_eval_batches"]
    config["trainer"] |= {"num_train_steps": steps, "train_batch_size": 16}
    config["trainer"]["compilation_cache_dir"] = str(place.cache / "xla")
    for name, keys in sections.items():
        config[name] |= keys
    path.write_text(yaml.safe_dump(config))
    return place


def finish(place: Workplace, *options: str) -> str:
    finished = place.finish("--config_path", "run.yaml", *options)
    return finished.out


def steps_of(place: Workplace) -> list[dict[str, Any]]:
    return [record for record in read_jsonl(place.folder / "logs/run/metrics.jsonl") if "train/loss" in record]


def same_everywhere(place: Workplace) -> list[dict[str, Any]]:
    """The records without times and rates."""
    timed = ("throughput/", "train/rollout/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in steps_of(place)]


def success(place: Workplace, step: int) -> float:
    """The exact probability that the first token is right, over all digits."""
    model = jaxlm.load(str(place.folder / f"checkpoints/run/step-{step}"))
    logits = [row[-1].astype(np.float64) for row in model.logits([prompt_ids(digit) for digit in range(DIGITS)])]
    right = [row[FIRST + (digit + 1) % DIGITS] - np.log(np.exp(row).sum()) for digit, row in enumerate(logits)]
    return float(np.exp(right).mean())


CHECKED = {"checkpointer": {"base_path": "checkpoints", "save_interval": "1000s", "keep": [{"every": 25}]}}


@pytest.mark.soak
def test_the_model_learns_the_successor(workplace):
    place = start(workplace(), 60)
    shown = finish(place)
    records = steps_of(place)
    rewards = [record["train/reward"] for record in records]
    assert np.mean(rewards[:10]) < 0.25
    assert np.mean(rewards[-10:]) > 0.8
    assert success(place, 60) > 0.9
    assert max(record["train/sampling/logp_diff_max"] for record in records) < 1e-5
    assert max(abs(record["train/clip_ratio/high_mean"]) for record in records) == 0
    for record in records:  # the reward of the host and that of the objective
        assert record["train/rewards/right"] == pytest.approx(record["train/reward"], rel=1e-5)
    assert records[-1]["train/completions/clipped_ratio"] < 0.5 < records[0]["train/completions/clipped_ratio"]
    assert records[-1]["train/entropy"] < records[0]["train/entropy"]
    line = next(line for line in shown.splitlines() if line.startswith("step 60/60"))
    assert line.startswith("step 60/60  reward ")
    assert "  length " in line
    assert "rollout " in next(line for line in shown.splitlines() if "wall time" in line)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_learn_too(workplace, seed):
    place = start(workplace(), 150, trainer=CHECKED | {"seed": seed})
    finish(place)
    probabilities = [success(place, step) for step in range(25, 151, 25)]
    assert probabilities[0] > 1 / 16
    assert probabilities[-1] > 0.9
    # It grows from checkpoint to checkpoint, until hardly anything is left to learn.
    assert all(after > before for before, after in itertools.pairwise(probabilities) if before < 0.95)


@pytest.mark.soak
@pytest.mark.parametrize("control", ["rate 0", "negated"])
def test_nothing_is_learned_without_a_rate_and_the_opposite_from_the_opposite_reward(workplace, control):
    changes: dict[str, Any] = {"optimizer": {"learning_rate": 0.0}}
    if control == "negated":
        changes = {
            "data": {"rewards": [{"type": "function", "function": "tests.end_to_end.successor:wrong", "name": "wrong"}]}
        }
    place = start(workplace(), 150, trainer=CHECKED, **changes)
    finish(place)
    first, last = success(place, 25), success(place, 150)
    if control == "negated":
        assert last < 1 / 16
    else:
        assert first == last < 0.2


@pytest.mark.soak
def test_the_reference_holds_the_model_back(workplace):
    found = {}
    for coefficient in (0.001, 1.0):
        place = start(workplace(), 150, objective={"kl": {"coef": coefficient}})
        finish(place)
        found[coefficient] = (steps_of(place)[-1]["train/kl"], success(place, 150))
    assert found[1.0][0] < found[0.001][0] / 3
    assert found[1.0][1] < found[0.001][1]


# Steps 5 to 8 train on the second rollout, twice on each of its mini-batches.
SEVERAL = {
    "updates_per_rollout": 4,
    "minibatches_per_rollout": 2,
    "dynamic_sampling": 1,
    "curriculum": {"type": "success", "solved_at": 0.8, "easy": 0.9, "hard_share": 0.4},
    "rewards": [*ROLLOUTS["rewards"], {"type": "length", "weight": -0.01}],
    "top_k": 9,
    "top_p": 0.95,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
}
KEPT = {
    "mask_truncated": True,
    "advantage": "normalize_then_sum",
    "entropy": {"coef": 0.001, "adaptive": {"target": 9.0}},
}


@pytest.fixture(scope="module")
def whole(workplace) -> Callable[[], Workplace]:
    """A run of 12 steps with several updates of each rollout."""
    made: list[Workplace] = []

    def run() -> Workplace:
        if not made:
            made.append(start(workplace(), 12, data=SEVERAL, objective=KEPT))
            finish(made[0])
        return made[0]

    return run


@pytest.mark.slow
def test_a_run_that_is_killed_within_a_rollout_goes_on_bit_for_bit(whole, workplace):
    place = start(workplace(), 12, data=SEVERAL, objective=KEPT)
    place.die("--config_path", "run.yaml", "--trainer.checkpointer.save_interval", "0s", at="first phase")
    newest = max((int(name[5:]) for name in place.checkpoints() if name[5:].isdecimal()), default=0)
    assert 4 < newest < 8
    position = json.loads((place.folder / f"checkpoints/run/step-{newest}/data/position.json").read_text())
    assert (position["rollout"]["first_step"], position["rollout"]["end"]) == (4, 8)
    assert position["curriculum"]["rates"]
    assert max(record["train/curriculum/passed_over"] for record in steps_of(whole())) > 0
    assert len({record["train/entropy_coef"] for record in steps_of(whole())}) > 6
    assert "resuming" in finish(place)
    assert place.losses() == whole().losses()
    assert same_everywhere(place) == same_everywhere(whole())
    assert place.digest("step-12") == whole().digest("step-12")
    assert any(abs(record["train/sampling/logp_diff_max"]) > 1e-4 for record in steps_of(place))  # later updates


@pytest.mark.soak
def test_a_run_that_is_killed_while_it_samples_goes_on_bit_for_bit(whole, workplace):
    place = start(workplace(), 12, data=SEVERAL, objective=KEPT)
    place.die("--config_path", "run.yaml", at="scoring", module="tests.systems.rl.dies")
    assert "resuming" in finish(place)
    assert same_everywhere(place) == same_everywhere(whole())
    assert place.digest("step-12") == whole().digest("step-12")


@pytest.mark.soak
def test_two_processes_whose_reward_fails_save_the_last_step(workplace):
    """The test below goes on from there, which takes two more starts."""
    rewards = [{"type": "function", "function": "tests.end_to_end.successor:fails_in_the_third_call", "name": "right"}]
    place = start(workplace(2), 3, data={"rewards": rewards, "group_size": 2}, trainer={"train_batch_size": 4})
    (place.folder / "fails").touch()
    for code, _, err in place.run_all(2, "--config_path", "run.yaml"):
        assert code == 2, err
        assert "Correct the reward. The run is saved at step 2: the same command continues from there" in err
    position = json.loads((place.folder / "checkpoints/run/step-2/data/position.json").read_text())
    assert position["step"] == 2
    assert list(place.losses()) == [1, 2]


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_whose_reward_fails_is_saved_and_goes_on_bit_for_bit(workplace, processes):
    """The third rollout of two updates begins at step 4."""
    rewards = [{"type": "function", "function": "tests.end_to_end.successor:fails_in_the_third_call", "name": "right"}]
    keys = {"rewards": rewards, "updates_per_rollout": 2}
    place, whole = (start(workplace(processes), 6, data=keys) for _ in range(2))
    (place.folder / "fails").touch()
    for code, _, err in place.run_all(processes, "--config_path", "run.yaml"):
        assert code == 2, err
        assert "reward 'right' (type: function): it raised ValueError: cannot go on in " in err
        assert "Correct the reward. The run is saved at step 4: the same command continues from there" in err
    assert "step-4" in place.checkpoints()
    (place.folder / "fails").unlink()
    for each in (place, whole):
        for code, _, err in each.run_all(processes, "--config_path", "run.yaml"):
            assert code == 0, err
    assert same_everywhere(place) == same_everywhere(whole)
    assert place.digest("step-6") == whole.digest("step-6")


def assert_close(ours: Workplace, theirs: Workplace) -> None:
    """The same tokens, hence the same rewards and lengths, and numbers that differ by rounding alone."""
    for mine, other in zip(steps_of(ours), steps_of(theirs), strict=True):
        for name in ("train/reward", "train/completions/mean_length", "train/frac_reward_zero_std"):
            assert mine[name] == pytest.approx(other[name], abs=1e-6), (mine["step"], name)
        assert mine["train/loss"] == pytest.approx(other["train/loss"], abs=1e-5)
        assert mine["grad/norm/total"] == pytest.approx(other["grad/norm/total"], rel=1e-3)


@pytest.mark.soak
def test_two_processes_sample_and_train_like_one(whole, workplace):
    place = start(workplace(2), 12, data=SEVERAL)
    for code, _, err in place.run_all(2, "--config_path", "run.yaml"):
        assert code == 0, err
    assert_close(place, whole())


@pytest.mark.soak
def test_two_processes_train_in_a_random_environment(workplace):
    """If each process had its own, they would have other numbers of turns, and wait for each other."""
    keys = {"environment": {"type": "tests.systems.rl.own:DiceConfig"}, "max_turns": 3, "max_new_tokens": 12}
    place = start(workplace(2), 4, data={**keys, "rewards": []})
    for code, _, err in place.run_all(2, "--config_path", "run.yaml"):
        assert code == 0, err
    for record in steps_of(place):
        assert record["train/rewards/environment"] == pytest.approx(record["train/reward"], rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    "keys", [{}, {"per_device_parallelism": 1}, {"fsdp_axis": None}], ids=["fsdp", "microbatches", "replicated"]
)
def test_eight_devices_sample_and_train_like_one(whole, workplace, keys):
    place = start(workplace(8), 12, data=SEVERAL | {"sampler": {"max_rows": 48}}, trainer=keys)
    finish(place)
    assert_close(place, whole())
