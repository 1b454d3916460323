"""Rewards in their processes: the sum, and every way in which a reward fails."""

import contextlib
import functools
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.rl.rewards import worker
from jaxlm.systems.rl.rewards.base import RewardConfig, Rewards
from tests.systems.rl.rows import CONTEXT, rows

FILE = Path(__file__).with_name("functions.py")
ROOT = Path(__file__).parents[3]


def configs(*trees):
    return [decode(RewardConfig, ConfigSource(tree)) for tree in trees]


def function(name, **keys):
    return {"type": "function", "function": f"{FILE}:{name}", **keys}


@pytest.fixture(scope="module")
def told():
    """A reward that does what the completion says."""
    with Rewards(configs(function("as_told", per="row")), CONTEXT, timeout_s=60) as rewards:
        yield rewards


@pytest.mark.slow
def test_the_total_is_the_weighted_sum_of_the_rewards_that_apply():
    of_row = function("of_row", per="row", weight=0.25)
    parts = configs({"type": "length", "weight": -2.0}, of_row, {"type": "exact_match", "name": "right", "weight": 0})
    given = rows("abcde", "a", "b" * 30, answer=["abcde", "x", None])
    with Rewards(parts, CONTEXT, timeout_s=60) as rewards:
        first, again = rewards.score(given), rewards.score(given)
        assert list(first) == ["length", "of_row", "right", "reward"]
        np.testing.assert_array_equal(first["length"], [-0.25, -0.05, -1])
        np.testing.assert_array_equal(first["of_row"], [2, 0, np.nan])
        np.testing.assert_array_equal(first["right"], [1, 0, np.nan])
        np.testing.assert_array_equal(first["reward"], [0.5 + 0.5, 0.1, 2])
        assert all(column.dtype == np.float64 for column in first.values())
        for name, column in first.items():
            assert column.tobytes() == again[name].tobytes()
        rewards.check_columns(["answer", "topic"])
        with pytest.raises(
            ConfigError, match=r"'of_row' reads the column 'answer', which .* do not have. Their columns: topic"
        ):
            rewards.check_columns(["topic"])


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ("raise", f"it raised KeyError: 'answer' in {re.escape(str(FILE))}, line \\d\\d"),
        ("return nan", "it returned nan, a finite number expected"),
        ("return text", "it returned 'good', a finite number expected"),
        ("exit", "it raised SystemExit: 3"),
        ("return huge", r"it returned 10000.*, a number from -3\.4e\+38 to 3\.4e\+38 \(float32\) expected"),
        ("return endless", r"it returned a value with too many digits to show, a number from -3\.4e\+38"),
        ("return large", r"it returned 1e\+39, a number from -3\.4e\+38 to 3\.4e\+38 \(float32\) expected"),
        ("return object", "it raised RuntimeError: no text"),
        ("fork exit", "its process ended with exit code 3 while it scored"),
        ("kill 9", "its process ended with the signal SIGKILL while it scored"),
        ("kill 40", "its process ended with the signal 40 while it scored"),
    ],
)
def test_a_reward_that_fails_is_one_message(told, completion, problem):
    with pytest.raises(ConfigError) as caught:
        told.score(rows("well", completion, "well"))
    message = str(caught.value)
    assert re.search(problem, message), message
    assert message.startswith("reward 'as_told' (type: function): ")
    assert f'data.jsonl:2 (completion "{completion}")' in message
    assert "checkpoint" not in message, "an evaluation has none, and a run says what it has saved"
    assert "\n" not in message
    np.testing.assert_array_equal(told.score(rows("well", "return 7"))["as_told"], [0.5, 7])


@pytest.mark.slow
def test_rewards_work_at_the_same_time_on_any_number_of_rows(tmp_path):
    """The first reward waits in its first row for the last row of the second one."""
    given = rows(f"wait {tmp_path / 'file'}", *["x"] * 600, f"touch {tmp_path / 'file'}")
    pair = configs(function("waits", per="row"), function("touches", per="row"))
    with Rewards(pair, CONTEXT, timeout_s=60) as rewards:
        assert (rewards.score(given)["reward"] == 2).all()


@pytest.mark.slow
def test_a_failure_is_told_at_once_although_another_reward_hangs(tmp_path):
    pair = configs(function("waits", per="row"), function("as_told", per="row"))
    with Rewards(pair, CONTEXT, timeout_s=600) as rewards:
        with pytest.raises(ConfigError, match=r"reward 'as_told' .* it raised KeyError"):
            rewards.score(rows("raise", f"wait {tmp_path / 'never'}"))
        assert rewards.score(rows("well"))["reward"] == 1.5


@pytest.mark.parametrize("how", ["", "kill"], ids=["closed", "killed"])
def test_what_a_reward_has_left_behind_is_ended_with_it(tmp_path, how):
    ids = tmp_path / "ids"
    with Rewards(configs(function("as_told", per="row")), CONTEXT, timeout_s=60) as rewards:
        if how == "kill":
            with pytest.raises(ConfigError, match="ended with the signal SIGKILL while it scored"):
                rewards.score(rows(f"leave {ids} kill"))
        else:
            assert rewards.score(rows(f"leave {ids}"))["reward"] == 0.5
            left = [number for number in map(int, ids.read_text().split()) if not has_ended(number, patience_s=0)]
            assert len(left) == 3
    numbers = list(map(int, ids.read_text().split()))
    assert len(numbers) == 3
    assert all(map(has_ended, numbers))


@pytest.mark.parametrize("text", ["garbage", "line", "[[[[[", '["scored",[]]'])
def test_a_reward_that_writes_to_the_run_s_connection_is_told_at_once(told, text):
    with pytest.raises(
        ConfigError, match=r"'as_told' .*: something other than its own process wrote to the connection"
    ):
        told.score(rows("well", f"write {text}", "well"))
    assert told.score(rows("well"))["reward"] == 0.5


@pytest.mark.slow
def test_a_reward_that_writes_to_the_connection_and_hangs_is_ended_in_time():
    with Rewards(configs(function("as_told", per="row")), CONTEXT, timeout_s=1) as rewards:
        with pytest.raises(ConfigError, match=r"no result for data.jsonl:1 .* within 1 s.*Its process has been ended"):
            rewards.score(rows("write nothing-else"))
        assert rewards.score(rows("well"))["reward"] == 0.5


def test_a_reward_answers_a_run_with_many_open_files():
    """`select` cannot wait for descriptors from 1,024 on."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, allowed[1]), allowed[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, allowed)
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        rewards = stack.enter_context(Rewards(configs({"type": "length"}), CONTEXT, timeout_s=60))
        assert rewards.score(rows("abc"))["reward"] == -0.15


@pytest.mark.slow
def test_a_reward_that_reads_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(worker, "_SEND_S", 1)
    with Rewards(configs(function("as_told", per="row")), CONTEXT, timeout_s=600) as rewards:
        (one,) = rewards._workers.values()
        os.kill(scorer_of(one), signal.SIGSTOP)
        with pytest.raises(ConfigError, match=r"no result for .* within 600 s.*Its process has been ended"):
            rewards.score(rows("x" * 5_000_000))
        assert rewards.score(rows("well"))["reward"] == 0.5


def test_a_fork_of_a_reward_answers_nothing(told):
    for _ in range(3):
        np.testing.assert_array_equal(told.score(rows("fork"))["as_told"], [1])
    np.testing.assert_array_equal(told.score(rows("return 7"))["as_told"], [7])


def test_rewards_see_no_accelerator(told):
    assert told.score(rows("devices"))["reward"] == 1


@pytest.mark.slow
def test_a_reward_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """Its time is over once it hangs, and the run knows in which row."""
    ids, start = tmp_path / "ids", time.monotonic()
    with Rewards(configs(function("as_told", per="row")), CONTEXT, timeout_s=300) as rewards:
        with monkeypatch.context() as patch:
            patch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: start + 301 * ids.exists()))
            patch.setattr(worker, "_LONGEST_WAIT_S", 0.05)
            late = r"no result for data.jsonl:2 .* within 300 s.*Its process has been ended"
            with pytest.raises(ConfigError, match=late):
                rewards.score(rows("well", f"hang {ids}"))
        for number in map(int, ids.read_text().split()):
            assert has_ended(number)
        np.testing.assert_array_equal(rewards.score(rows("well"))["as_told"], [0.5])


def has_ended(number, patience_s=60):
    """Whether a process has ended, or is only waited for by its parent."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def scorer_of(worker):
    """The process of a reward below its supervisor."""
    (number,) = Path(f"/proc/{worker._process.pid}/task/{worker._process.pid}/children").read_text().split()
    return int(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_job_ends_no_reward(told, number):
    """The run saves after it, and its step still needs the rewards."""
    before = told.score(rows("right"))
    (worker,) = told._workers.values()
    for process in (worker._process.pid, scorer_of(worker)):
        os.kill(process, number)
    assert told.score(rows("right"))["reward"] == before["reward"]


@pytest.mark.slow
def test_a_wrong_number_of_values_names_all_records():
    with (
        Rewards(configs(function("too_few")), CONTEXT, timeout_s=60) as rewards,
        pytest.raises(
            ConfigError, match=r"2 values, but a list of 3 .* the 3 completions of data.jsonl:1 to data.jsonl:3"
        ),
    ):
        rewards.score(rows("a", "b", "c"))


def test_a_start_is_not_limited_by_the_time_for_scores():
    """The process begins to read its large tokenizer once it has imported its modules."""
    context = replace(CONTEXT, decode=functools.partial(str, "x" * 10_000_000))
    with Rewards(configs(function("as_told", per="row")), context, timeout_s=0.01) as rewards:
        assert rewards.columns == set()


def test_a_reward_that_does_not_open_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"reward 'x' \(type: function\): .*importing no_such_module failed"):
        Rewards(configs({"type": "function", "function": "no_such_module:x"}), CONTEXT, timeout_s=1)
    with Rewards([], CONTEXT, timeout_s=1) as none:
        assert list(none.score(rows("a", "b"))["reward"]) == [0, 0]


@pytest.mark.slow
def test_no_process_outlives_a_run_that_is_killed(tmp_path):
    program = f"""
from tests.systems.rl.test_processes import *
with Rewards(configs(function("as_told", per="row")), CONTEXT, timeout_s=600) as rewards:
    rewards.score(rows("hang {tmp_path}/ids"))
"""
    run = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (tmp_path / "ids").exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.kill()
    run.wait()
    for number in map(int, (tmp_path / "ids").read_text().split()):
        assert has_ended(number)


@pytest.mark.slow
def test_a_worker_imports_no_jax():
    modules = ", ".join(f"jaxlm.systems.rl.rewards.{name}" for name in ("base", "worker", "process", "answers"))
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == "False"
