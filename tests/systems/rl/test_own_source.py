"""Processes compare the source code of rewards and environments that are not jaxlm's."""

from jaxlm.plan.load_config import decode_run
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.startup import _start_facts

OWN = """
from dataclasses import dataclass

from jaxlm.systems.rl.environments import Environment, EnvironmentConfig
from jaxlm.systems.rl.rewards.base import RewardConfig


@dataclass(frozen=True)
class Room(EnvironmentConfig):
    def open(self):
        return Environment()


@RewardConfig.register_subclass("own_source_prize")
@dataclass(frozen=True)
class Prize(RewardConfig):
    def open(self, context):
        raise NotImplementedError
"""


def test_processes_compare_the_source_of_what_is_not_jaxlms(tmp_path, monkeypatch):
    """Under an import path or a short name. A reward's function is imported in its own process, on process 0 alone."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_source_room.py").write_text(OWN)
    rewards = [{"type": "own_source_prize"}, {"type": "function", "function": "own_source_not_imported:right"}]
    data = {"type": "rollouts", "environment": {"type": "own_source_room:Room"}, "rewards": rewards[:1]}
    objective = {"type": "grpo", "old_policy": "rollout", "kl": None}

    def facts(**keys):
        return _start_facts(decode_run(ConfigSource({"data": data | keys, "objective": objective}), None), "x")

    before = facts(rewards=rewards)
    own = {name for name in before if name.startswith("source of ")} - {"source of jaxlm"}
    assert own == {"source of own_source_room"}
    (tmp_path / "own_source_room.py").write_text(OWN + "# another version\n")
    after = facts(rewards=rewards)
    assert {name for name in after if after[name] != before[name]} == own
    assert facts(environment=None)["source of own_source_room"] == after["source of own_source_room"]
    assert "source of own_source_room" not in facts(environment=None, rewards=rewards[1:])
