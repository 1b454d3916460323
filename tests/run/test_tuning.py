"""`jaxlm bench --tune`: which options are chosen, that they are kept, and that only this machine uses them."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import bench
from jaxlm.config.load import decode_run
from jaxlm.config.yaml import ConfigSource
from jaxlm.run.compilation import options as options_module
from jaxlm.run.compilation.options import (
    TunedOptions,
    compiler_options,
    describe_options,
    keep,
    step_key,
    step_options,
    tuned_options,
)
from jaxlm.run.compilation.tuning import MIN_ROUNDS, median_interval, tune
from jaxlm.run.plan import make_plan

MODEL = {"type": "llama", "seq_len": 32, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 1, "num_heads": 4}
WIDE = {"xla_cpu_prefer_vector_width": 512}
XNNPACK = {"xla_cpu_use_xnnpack": True}


def plan_of(folder, **model):
    tree = {
        "model": {**MODEL, "num_kv_heads": 4, **model},
        "trainer": {"train_batch_size": 8, "compilation_cache_dir": str(folder)},
    }
    return make_plan(decode_run(ConfigSource(tree), "tuned"), "tuned", 300)


def of_this_machine(plan, **changes):
    here = options_module
    made = {
        "processor": here.processor(),
        "jaxlib": here.jaxlib.version.__version__,
        "step": step_key(plan),
        "options": WIDE,
        "ratio": (1.1, 1.2, 1.3),
        "measured_unix_s": 0.0,
    }
    return TunedOptions(**{**made, **changes})


class Programs:
    """Stands in for the compiler and the clock: the seconds of a step by the options it is compiled with."""

    def __init__(self, seconds, wrong=(), unknown=()):
        self.seconds, self.wrong, self.unknown = seconds, wrong, unknown
        self.now = 0.0

    def compile_with(self, options):
        if any(name in self.unknown for name in options):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'x'\nmore")
        loss = 2.0 if any(name in self.wrong for name in options) else 1.0

        def step(state, batch):
            self.now += self.seconds(set(options))
            return state, SimpleNamespace(metrics={"train/objective": jnp.asarray(loss)})

        return step

    def best(self, plan, monkeypatch):
        lines = []
        monkeypatch.setattr("jaxlm.run.compilation.tuning.time.perf_counter", lambda: self.now)
        tuned = tune(plan, self.compile_with, {"weight": jnp.zeros(2)}, [0, 1], MIN_ROUNDS, lines.append)
        return tuned, "\n".join(lines)


@pytest.fixture
def candidates(monkeypatch):
    monkeypatch.setattr("jaxlm.run.compilation.tuning.jax.block_until_ready", lambda report: report)
    found = {"cpu": ({"a": True}, {"b": 512}, {"c": True})}
    monkeypatch.setattr("jaxlm.run.compilation.tuning.CANDIDATES", found)


def test_options_that_help_are_combined(candidates, tmp_path, monkeypatch):
    seconds = lambda names: 0.02 / (1.5 if "a" in names else 1) / (1.3 if "b" in names else 1)  # noqa: E731
    tuned, output = Programs(seconds).best(plan_of(tmp_path), monkeypatch)
    assert tuned.options == {"a": True, "b": 512}
    assert tuned.ratio[1] == pytest.approx(1.95)
    assert "b=512 (beside a): 1." in output


def test_wrong_unknown_and_slower_options_are_not_chosen(candidates, tmp_path, monkeypatch):
    seconds = lambda names: 0.01 if names & {"a", "b"} else 0.03 if "c" in names else 0.02  # noqa: E731
    tuned, output = Programs(seconds, wrong="a", unknown="b").best(plan_of(tmp_path), monkeypatch)
    assert tuned.options == {}
    assert str(tuned).startswith("XLA's own, the fastest when tuned on")
    assert "a=true: cannot be used: its losses are [2.0, 2.0] instead of [1.0, 1.0]" in output
    assert "b=512: cannot be used: INVALID_ARGUMENT: No such compile option: 'x'" in output
    assert "c=true: 0.6" in output


def test_the_interval_holds_the_median_in_95_of_100_samples():
    rng = np.random.default_rng(0)
    for number in (MIN_ROUNDS, 20, 41):
        samples = rng.lognormal(size=(4000, number))  # its median is 1
        held = np.mean([low <= 1 <= high for low, _, high in map(median_interval, samples)])
        assert 0.95 <= held < 0.985
    assert median_interval([1.0, 2.0, 3.0])[::2] == (-np.inf, np.inf)


def test_the_step_is_compiled_with_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    plan = plan_of(tmp_path)
    assert step_options(plan) == compiler_options("cpu")
    assert "jaxlm bench --tune" in describe_options(plan)
    keep(plan, of_this_machine(plan, options=XNNPACK))
    keep(plan, of_this_machine(plan))  # takes the place of the one before
    keep(plan, of_this_machine(plan, step="another"))
    assert len(json.loads((tmp_path / "tuned_options.json").read_text())) == 2
    assert step_options(plan) == WIDE
    text = "xla_cpu_prefer_vector_width=512: 1.20 times as fast as without (1.10 to 1.30), tuned on 1970-01-01"
    assert describe_options(plan) == text
    assert step_options(plan_of(tmp_path, hidden_dim=64)) == {}
    monkeypatch.setattr(options_module, "same_on_all_processes", lambda text: False)
    assert step_options(plan) == {}
    assert describe_options(plan).startswith("XLA's own; those tuned here are not used")
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=256")
    assert step_options(plan) == {}
    assert describe_options(plan).startswith("XLA's own; those tuned here are not used")


@pytest.mark.parametrize("difference", [{"processor": "Intel Xeon 6/85/7, 2 cores"}, {"jaxlib": "0.0.1"}])
def test_another_machine_does_not_use_them_and_says_so(tmp_path, difference):
    plan = plan_of(tmp_path)
    keep(plan, of_this_machine(plan, **difference))
    assert step_options(plan) == compiler_options("cpu")
    described = describe_options(plan)
    assert "tuned on another machine" in described
    assert str(next(iter(difference.values()))) in described
    assert "Tune again: jaxlm bench --tune" in described


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, null, {}]",
        b"[" * 100_000,
        b'{"processor": 1}',
        b'[{"processor": "x", "jaxlib": "y", "step": "z", "options": {"rm": 1}, "ratio": [1, 1, 1], "measured_unix_s": 0}]',
        b'[{"processor": "x", "jaxlib": "y", "step": "z", "options": [], "ratio": "abc", "measured_unix_s": 0}]',
    ],
)
def test_a_damaged_file_is_no_reason_to_fail(tmp_path, content):
    plan = plan_of(tmp_path)
    (tmp_path / "tuned_options.json").write_bytes(content)
    assert tuned_options(plan) is None
    assert step_options(plan) == compiler_options("cpu")
    keep(plan, of_this_machine(plan))
    assert tuned_options(plan) == of_this_machine(plan)


@pytest.mark.parametrize(
    "damage",
    [
        {"measured_unix_s": 1e300},
        {"measured_unix_s": "x"},
        {"options": {"xla_cpu_prefer_vector_width": "wide"}},
        {"options": {"xla_cpu_use_xnnpack": 1}},
        {"options": {"xla_cpu_use_xnnpack": [True]}},
        {"options": ["xla_cpu_use_xnnpack"]},
    ],
)
def test_a_damaged_entry_of_this_machine_is_not_used(tmp_path, damage):
    plan = plan_of(tmp_path)
    entry = asdict(of_this_machine(plan)) | damage
    (tmp_path / "tuned_options.json").write_text(json.dumps([entry]))
    assert step_options(plan) == compiler_options("cpu")
    assert "looks for faster ones" in (describe_options(plan) or "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "h100-1"], "Remove --topology and --warmup"),
        (["--warmup", "3"], "Remove --topology and --warmup"),
        (["--steps", "3"], "--steps: 3 given, but --tune needs at least 6"),
        (["--trainer.compilation_cache_dir", "null"], "trainer.compilation_cache_dir: None given"),
        (["--trainer.compilation_cache_dir", "gs://bucket/x"], "in a local folder"),
        (["--trainer.distributed", "{coordinator_address: 'a:1', num_processes: 2, process_id: 0}"], "one process"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message, capsys):
    assert bench.main(["--tune", "--trainer.seed", "1", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert bench.main(["--tune", "true", "--trainer.seed", "1", *arguments]) == 2  # as other switches are written
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_keeps_what_it_finds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = {"cpu": (WIDE, {"xla_cpu_enable_wishful_thinking": True})}
    monkeypatch.setattr("jaxlm.run.compilation.tuning.CANDIDATES", few)
    words = [f"--model.{name}={value}" for name, value in {**MODEL, "num_kv_heads": 4}.items()]
    assert (
        bench.main(["--tune", "--steps", "6", "--trainer.train_batch_size", "8", "--data.vocab_size", "300", *words])
        == 0
    )
    shown = capsys.readouterr().out
    assert "xla_cpu_enable_wishful_thinking=true: cannot be used: INVALID_ARGUMENT: No such compile option" in shown
    assert "xla_cpu_prefer_vector_width=512: " in shown
    last = json.loads(shown.splitlines()[-1])
    assert json.loads((tmp_path / "cache" / "xla" / "tuned_options.json").read_text()) == [last]
