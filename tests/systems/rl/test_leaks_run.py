"""A run of 3,000 steps with rollouts holds no more at its end than after a third."""

import random
from typing import Any

import pytest
import yaml

from tests.end_to_end.commands import Workplace
from tests.end_to_end.successor import TOKENS, write_task
from tests.end_to_end.test_leaks import STEPS, check, counted
from tests.http_server import serving


def grpo(place: Workplace) -> dict[str, Any]:
    """Rollouts, with a reward in a process of its own and templates rendered in another, and their evaluation."""
    write_task(place.folder)
    config = yaml.safe_load(place.write().read_text())
    config["model"] |= {"seq_len": 16}
    config["trainer"] |= {
        "num_train_steps": STEPS,
        "steps_per_eval": 50,
        "train_batch_size": 8,
        "checkpointer": {"base_path": "checkpoints", "save_interval": "5s", "keep": [{"every": 1000}]},
    }
    del config["trainer"]["max_eval_batches"]
    rewards = [
        {"type": "function", "function": "tests.end_to_end.successor:right", "name": "right"},
        {"type": "length", "weight": -0.01},
    ]
    return config | {
        "data": {
            "type": "rollouts",
            "train_urls": ["prompts.jsonl"],
            "tokenizer": "tokenizer",
            "cache_dir": "cache",
            "group_size": 4,
            "max_new_tokens": 6,
            "dynamic_sampling": 1,
            "updates_per_rollout": 2,
            "minibatches_per_rollout": 2,
            "rewards": rewards,
        },
        "objective": {"type": "grpo", "old_policy": "rollout", "kl": {"coef": 0.01}},
        "evals": [
            {"type": "rollouts", "prompts_file": "prompts.jsonl", "rewards": rewards, "max_new_tokens": 6},
            {"type": "samples", "prompts": ["3 ="], "max_new_tokens": 3},
        ],
    }


def served(place: Workplace, url: str) -> dict[str, Any]:
    """Rollouts of a server, with an export of the weights for every second update."""
    config = grpo(place)
    config["trainer"] |= {"train_batch_size": 2}
    sampler = {"type": "server", "weights_folder": "weights", "server": {"url": url}}
    config["data"] |= {"group_size": 2, "dynamic_sampling": 0, "minibatches_per_rollout": 1, "sampler": sampler}
    return config


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers."""
    tokens = random.Random(body["seed"]).choices(range(1, len(TOKENS)), k=body["max_tokens"])
    logprobs = {"token_logprobs": [-1.0] * len(tokens)}
    return {"choices": [{"token_ids": tokens, "logprobs": logprobs, "finish_reason": "length"}]}


@pytest.mark.soak
def test_nothing_grows(workplace):
    place = workplace()
    check(counted(place, grpo(place)))


@pytest.mark.soak
def test_nothing_grows_while_a_server_samples(workplace, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    place = workplace()
    with serving() as server:
        server.answers |= {"/v1/completions": completion, "/collective_rpc": lambda body: {"results": [None]}}
        server.answers["/reset_prefix_cache"] = lambda body: None
        check(counted(place, served(place, server.url)))
