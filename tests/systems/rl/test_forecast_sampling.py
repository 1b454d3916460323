"""What a forecast takes the model to sample for a rollout."""

from jaxlm.systems.rl.json_server import ServerConfig
from jaxlm.systems.rl.rollouts import RolloutsConfig
from jaxlm.systems.rl.samplers import LocalSamplerConfig
from jaxlm.systems.rl.server import ServerSamplerConfig


def test_responses_that_are_sampled_at_once():
    """As many as a rollout has (tests/systems/rl/test_rollouts.py), or as `max_rows` allows."""
    options = {"group_size": 4, "max_new_tokens": 24, "minibatches_per_rollout": 2, "updates_per_rollout": 6}
    found = RolloutsConfig(**options, sampler=LocalSamplerConfig(max_rows=48)).batch_spec(64).sampled
    assert found is not None
    assert (found.num_rows(batch_size=8), found.num_steps) == (4 * 2 * 8, 6)
    assert (found.prompt_tokens, found.new_tokens) == (40, 24)
    assert [found.rows_at_once(rows) for rows in (64, 32)] == [48, 32]
    whole = RolloutsConfig(**options).batch_spec(64).sampled
    assert whole is not None
    assert whole.rows_at_once(64) == 64


def test_a_server_samples_nothing_on_the_devices_that_train():
    sampler = ServerSamplerConfig(ServerConfig("http://127.0.0.1:1"), weights_folder="weights")
    assert RolloutsConfig(sampler=sampler).batch_spec(512).sampled is None
