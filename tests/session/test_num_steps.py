"""The number of steps when the data determines it."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.mixture import Mixture
from jaxlm.plan.batches import BatchPlan
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.num_steps import check_num_steps, epoch_of, small_sources, with_num_steps_of_data
from jaxlm.plan.plan import plan_phases
from jaxlm.reading.yaml import ConfigSource
from tests.session.test_init_from import Trainings

READ = Mixture.read
EIGHT_ROWS = BatchPlan(BatchSchedule.of([BatchSize(0, 8)]), eval=8)
MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


@pytest.fixture
def resolved(tmp_path):
    for name, size in {"a": 300, "b": 100}.items():
        (tmp_path / f"{name}.txt").write_text("some words " * size)

    def resolve(data=None, said=None, **sections):
        own = {"train_urls": [f"{tmp_path}/a.txt"]} if data is None else data
        own = {"cache_dir": str(tmp_path / "cache"), "vocab_size": 260, **own}
        config = decode_run(ConfigSource({"model": dict(MODEL), "data": own, **sections}), None)
        tokenizer = config.data.corpus.load_tokenizer(log=lambda _: None)
        log = (lambda _: None) if said is None else said.append
        return with_num_steps_of_data(config, EIGHT_ROWS, tokenizer, log), tokenizer

    resolve.folder = tmp_path
    return resolve


def steps(config) -> list[int]:
    return [phase.num_steps for phase in plan_phases(config)[0]]


def test_epochs_set_the_number_of_steps(resolved):
    config, tokenizer = resolved(epoch=3)
    windows = config.data.open(tokenizer, 16, lambda _: None).train[""]
    assert steps(config) == [-(-3 * len(windows) // 8)]
    assert with_num_steps_of_data(config, EIGHT_ROWS, tokenizer, print) == config, "as in a resumed run"
    data, (phase,) = config.data.open(tokenizer, 16, lambda _: None), plan_phases(config)[0]
    epoch = epoch_of(phase, data, EIGHT_ROWS.train)
    assert [epoch(step) for step in range(phase.num_steps)] == [8 * s // len(windows) for s in range(phase.num_steps)]
    assert epoch(phase.num_steps - 1) == 2
    own = [{"name": "p"}, {"name": "q", "num_train_steps": 7}]
    assert steps(resolved(epoch=3, phases=own)[0]) == [*steps(config), 7]
    assert steps(resolved(trainer={"num_train_steps": 5})[0]) == [5]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"epoch": -1}, "epoch: -1 given"),
        (
            {"epoch": 2, "trainer": {"num_train_steps": 5}},
            "epoch: 2 means .* steps .* trainer.num_train_steps: 5 is given",
        ),
        ({"epoch": 2, "phases": [{"name": "p", "num_train_steps": 3}]}, "epoch: has no effect"),
    ],
)
def test_contradictions_are_errors(resolved, sections, said):
    with pytest.raises(ConfigError, match=said):
        resolved(**sections)


PAIR = [{"name": "p", "num_train_steps": 3}, {"name": "q", "num_train_steps": 4}]


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({"phases": PAIR}, None),
        ({"phases": PAIR, "trainer": {"num_train_steps": 7}}, None),
        ({"phases": [{"name": "p"}, PAIR[1]], "trainer": {"num_train_steps": 5}}, None),
        (
            {"phases": PAIR, "trainer": {"num_train_steps": 5}},
            r"trainer\.num_train_steps: 5 given, .* Remove it, or set it to 7\. .* change phases\.N\.num_train_steps$",
        ),
    ],
)
def test_a_number_of_steps_that_no_phase_reads_is_refused(sections, refused):
    config = decode_run(ConfigSource({"model": dict(MODEL), **sections}), None)
    with contextlib.nullcontext() if refused is None else pytest.raises(ConfigError, match=refused):
        check_num_steps(config)


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({"phases": [{**PAIR[0], "num_train_steps": 2**31 - 5}, PAIR[1]]}, None),
        (
            {"phases": [{**PAIR[0], "num_train_steps": 2**31 - 4}, PAIR[1]]},
            r"num_train_steps: 2147483648 given in all 2 phases together, at most 2147483647 .*phases\.N\.num_train_steps$",
        ),
        (
            {"phases": [{"name": "p"}, PAIR[1]], "trainer": {"num_train_steps": 2**31 - 1}},
            r"num_train_steps: 2147483651 given in all 2 phases together",
        ),
    ],
)
def test_more_steps_in_all_than_are_counted_are_refused(sections, refused):
    with contextlib.nullcontext() if refused is None else pytest.raises(ConfigError, match=refused):
        check_num_steps(decode_run(ConfigSource({"model": dict(MODEL), **sections}), None))


def test_a_mixture_ends_according_to_its_stop_strategy(resolved):
    configs = {name: {"train_urls": [f"{resolved.folder}/{name}.txt"]} for name in "ab"}
    mixed = {"configs": configs, "train_weights": {"a": 1, "b": 1}, "mixture_block_size": 4}
    ends, said = {}, []
    for strategy in ("first_exhausted", "all_exhausted", "restart"):
        config, tokenizer = resolved({**mixed, "stop_strategy": strategy}, said)
        (ends[strategy],) = steps(config)
    sizes = [len(windows) for windows in config.data.open(tokenizer, 16, lambda _: None).train.values()]
    # Each source fills half of each block, so both are exhausted within a block of twice their sequences.
    assert abs(ends["first_exhausted"] * 8 - 2 * min(sizes)) <= 8 + 4
    assert abs(ends["all_exhausted"] * 8 - 2 * max(sizes)) <= 8 + 4
    assert ends["restart"] == 400_000
    assert sum("steps instead of 400000, because the data is exhausted" in line for line in said) == 2
    assert steps(resolved({**mixed, "stop_strategy": "all_exhausted"}, trainer={"num_train_steps": 3})[0]) == [3]
    with pytest.raises(ConfigError, match="epoch: 1 given, but phase 'train' trains on several sources"):
        check_num_steps(decode_run(ConfigSource({"data": mixed, "epoch": 1}), None))


@pytest.mark.soak
def test_the_seed_of_the_data_order_alone(tmp_path, monkeypatch):
    """The same sequences in the same order as with `trainer.seed`, on other parameters."""
    runs, orders, initial = Trainings(tmp_path), [], []
    for seeds in ({"trainer": {"seed": 3}}, {"data_seed": 3}, {}):
        tokens: list[int] = []

        def reading(self: Mixture, rows: np.ndarray, *rest: Any, tokens: list[int] = tokens) -> Any:
            columns = READ(self, rows, *rest)
            tokens.extend(columns["tokens"].ravel().tolist())
            return columns

        monkeypatch.setattr(Mixture, "read", reading)
        runs.run(f"run{len(orders)}", 2, **seeds)
        orders.append(tokens)
        initial.append(runs.losses(f"run{len(initial)}")[1])
    assert orders[0] == orders[1] != orders[2]
    assert initial[0] != initial[1]


def test_data_of_less_than_a_batch_is_a_warning():
    class Sequences(list):
        seq_len = 16

    data: Any = SimpleNamespace(train={"": Sequences("ab"), "code": Sequences("abcdefgh")})
    (line,) = small_sources(data, 8)
    assert line.startswith("the training data is 2 packed sequences of 16 tokens, fewer than a batch of 8")
    assert small_sources(data, 2) == []
