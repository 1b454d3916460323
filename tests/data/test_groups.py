"""Groups of rewarded responses: their sequences and rewards, what is left out, batches, and how they are shown."""

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.formats.completions import GroupsFormat
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.several_completions import GroupsConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.data.helpers import some_text
from tests.data.test_loader import layout_of

RECORDS = [
    {
        "prompt": f"Q{n}: {some_text(n, 3)}",
        "responses": [f" a{k} {some_text(50 + n, 1 + k + n % 3)}" for k in range(3)],
        "rewards": [n, n + 0.25, -1],
    }
    for n in range(5)
]


@pytest.fixture
def opened(open_with):
    """Opens groups of three made of these records."""
    return open_with(GroupsConfig, lambda **keys: GroupsFormat(**{"group_size": 3} | keys))


def test_each_response_follows_the_prompt_and_has_its_reward(opened, tokenizer):
    examples = opened(RECORDS).train[""]
    columns = examples.read(np.arange(len(RECORDS)))
    assert columns["rewards"].dtype == np.float32
    for row, record in enumerate(RECORDS):
        assert columns["rewards"][row].tolist() == record["rewards"]
        for number, response in enumerate(record["responses"]):
            prompt, answer = tokenizer.encode_batch([record["prompt"], response])
            whole = [tokenizer.bos_id, *prompt, *answer, tokenizer.eos_id]
            size = len(whole) - 1
            assert columns["tokens"][row, number, :size].tolist() == whole[:-1]
            assert columns["targets"][row, number, :size].tolist() == whole[1:]
            assert columns["loss_mask"][row, number, :size].tolist() == [0] * len(prompt) + [1] * (len(answer) + 1)
            assert not columns["segment_ids"][row, number, size + 1 :].any()


def test_groups_without_room_for_a_response_are_left_out_with_their_rewards(opened):
    lines: list[str] = []
    long = {"prompt": "word " * 200, "responses": [" a", " b", " c"], "rewards": [7, 8, 9]}
    examples = opened([RECORDS[0], long, RECORDS[1]], 24, lines.append).train[""]
    assert examples.read(np.arange(2))["rewards"].tolist() == [RECORDS[0]["rewards"], RECORDS[1]["rewards"]]
    assert any("1 groups left out: their prompt leaves no room for a token of a completion" in line for line in lines)


def test_batches_keep_groups_together(opened):
    layout = layout_of(data=2)
    batch = next(iter(opened(RECORDS, 32).validation[0].batches(batch_size=8, layout=layout, max_batches=None)))
    assert [axis.name for axis in batch.responses.tokens.axes] == ["batch", "group", "position"]
    whole = np.asarray(batch.responses.tokens.array)
    np.testing.assert_array_equal(np.asarray(batch.sequences().tokens.array), whole.reshape(24, 32))
    rewards = np.asarray(batch.rewards.array)
    assert rewards[:5].tolist() == [record["rewards"] for record in RECORDS]
    assert not rewards[5:].any()
    sharding = jax.jit(lambda b: b.sequences().tokens.array)(batch).sharding
    assert sharding.spec[0] in ("data", ("data",)), "flattening moves no row between devices"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"responses": ["a", "b"]},
            r"line 1: expected a list of 3 texts under 'responses' \(data\.format\.group_size\)",
        ),
        ({"rewards": [1, 2, None]}, r"expected a list of 3 numbers under 'rewards'"),
        ({"rewards": [1, 2, True]}, r"expected a list of 3 numbers under 'rewards'"),
        ({"rewards": [1, float("nan"), 3]}, r"line 1: rewards\[1\]: nan given, a finite number expected"),
        (
            {"rewards": [1, 2, -1e39]},
            r"line 1: rewards\[2\]: -1e\+39 given, a number from -3\.4e\+38 to 3\.4e\+38 \(float32\)",
        ),
        ({"responses": "abc"}, r"expected a list of 3 texts under 'responses'"),
        ({"prompt": 3}, r"no text and no list of messages under 'prompt': it is 3"),
    ],
)
def test_invalid_groups_are_refused(opened, change, message):
    with pytest.raises(ConfigError, match=message):
        opened([{**RECORDS[0], **change}])


def test_the_size_of_groups_is_the_same_in_all_sources():
    with pytest.raises(
        ConfigError, match=r"data\.format\.type: text produces documents, but data\.type: groups expects groups"
    ):
        GroupsConfig(train_urls=["x.jsonl"], format=TextFormat()).batch_spec(8)
    configs = {
        name: {"train_urls": ["x.jsonl"], "cache_dir": name, "format": {"type": "groups", "group_size": size}}
        for name, size in {"one": 2, "two": 4}.items()
    }
    data = decode(DataConfig, ConfigSource({"type": "groups", "configs": configs}))
    with pytest.raises(ConfigError, match=r"groups of 2 and 4 responses given, but all sources must have the same"):
        data.batch_spec(8)
