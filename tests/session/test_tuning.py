"""`jaxlm bench --tune`: which options are chosen, that they are kept, and that only this machine uses them."""

import json
import re
from dataclasses import asdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.commands import bench
from jaxlm.core.devices import Caches
from jaxlm.core.tracing import BlockSizes
from jaxlm.models import chunked_loss
from jaxlm.models.attention.backends import blockwise
from jaxlm.plan.load_config import decode_run
from jaxlm.plan.plan import make_plan
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.compilation import options as options_module
from jaxlm.session.compilation.options import (
    StepOptions,
    TunedOptions,
    compiler_options,
    describe_options,
    describe_sizes,
    keep,
    size_candidates,
    step_key,
    step_options,
    tuned_options,
)
from jaxlm.session.compilation.step import trace_step
from jaxlm.session.compilation.tuning import MIN_ROUNDS, UnusableError, candidates_for, median_interval, tune

MODEL = {"type": "llama", "seq_len": 32, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 1, "num_heads": 4}
WIDE = {"xla_cpu_prefer_vector_width": 512}
XNNPACK = {"xla_cpu_use_xnnpack": True}
MIB = 2**20


def by_cache():
    return StepOptions.of("cpu", compiler_options("cpu"))


def plan_of(folder, batch=8, **model):
    tree = {
        "model": {**MODEL, "num_kv_heads": 4, **model},
        "trainer": {"train_batch_size": batch, "compilation_cache_dir": str(folder)},
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
        if any(name in self.unknown for name in options.xla):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option: 'x'\nmore")
        if options.sizes.loss_chunk_tokens == 4096:
            raise UnusableError("it needs 9 GiB")
        loss = 2.0 if any(name in self.wrong for name in options.xla) else 1.0
        sizes = {f"{name}={size}" for name, size in asdict(options.sizes).items()}

        def step(state, batch):
            self.now += self.seconds({*options.xla, *sizes})
            return state, SimpleNamespace(metrics={"train/objective": jnp.asarray(loss)})

        return step

    def best(self, plan, monkeypatch, candidates=({"a": True}, {"b": 512}, {"c": True})):
        lines = []
        monkeypatch.setattr("jaxlm.session.compilation.tuning.jax.block_until_ready", lambda report: report)
        monkeypatch.setattr("jaxlm.session.compilation.tuning.time.perf_counter", lambda: self.now)
        state = {"weight": jnp.zeros(2)}
        tuned = tune(plan, self.compile_with, candidates, state, [0, 1], MIN_ROUNDS, lines.append)
        return tuned, "\n".join(lines)


@pytest.fixture
def cached(monkeypatch):
    """A processor with 1 MiB of level-2 cache for each thread, and 32 MiB for all."""
    for module in (chunked_loss, blockwise, options_module):
        monkeypatch.setattr(module, "caches", lambda: Caches(MIB, 32 * MIB))


def test_options_that_help_are_combined(tmp_path, monkeypatch):
    seconds = lambda names: 0.02 / (1.5 if "a" in names else 1) / (1.3 if "b" in names else 1)  # noqa: E731
    tuned, output = Programs(seconds).best(plan_of(tmp_path), monkeypatch)
    assert tuned.options == {"a": True, "b": 512}
    assert tuned.ratio[1] == pytest.approx(1.95)
    assert "b=512 (beside a): 1." in output


def test_a_better_size_takes_the_place_of_a_good_one(tmp_path, monkeypatch):
    sizes = ({"loss_chunk_tokens": 64}, {"loss_chunk_tokens": 128}, {"a": True}, {"loss_chunk_tokens": 4096})
    faster = {"loss_chunk_tokens=64": 1.5, "loss_chunk_tokens=128": 1.2, "a": 1.1}
    seconds = lambda names: 0.02 / np.prod([faster.get(name, 1) for name in names])  # noqa: E731
    tuned, output = Programs(seconds).best(plan_of(tmp_path), monkeypatch, sizes)
    assert tuned.options == {"loss_chunk_tokens": 64, "a": True}
    assert tuned.ratio[1] == pytest.approx(1.65)
    assert "loss_chunk_tokens=128 (beside loss_chunk_tokens): 0.800 times as fast" in output
    assert "loss_chunk_tokens=4096: cannot be used: it needs 9 GiB" in output


def test_wrong_unknown_and_slower_options_are_not_chosen(tmp_path, monkeypatch):
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
    assert step_options(plan) == by_cache()
    assert "jaxlm bench --tune" in describe_options(plan)
    keep(plan, of_this_machine(plan, options=XNNPACK))
    keep(plan, of_this_machine(plan))  # takes the place of the one before
    keep(plan, of_this_machine(plan, step="another"))
    assert len(json.loads((tmp_path / "tuned_options.json").read_text())) == 2
    assert step_options(plan) == StepOptions(WIDE, by_cache().sizes)
    text = "xla_cpu_prefer_vector_width=512: 1.20 times as fast as without (1.10 to 1.30), tuned on 1970-01-01"
    assert describe_options(plan) == text
    assert step_options(plan_of(tmp_path, hidden_dim=64)) == by_cache()
    monkeypatch.setattr(options_module, "same_on_all_processes", lambda text: False)
    assert step_options(plan) == by_cache()
    assert describe_options(plan).startswith("XLA's own; those tuned here are not used")
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=256")
    assert step_options(plan) == by_cache()
    assert describe_options(plan).startswith("XLA's own; those tuned here are not used")


@pytest.mark.soak
def test_only_sizes_that_make_another_program_are_measured(cached, tmp_path):
    """4 rows of 256 tokens on each device: chunks of 2,048 and blocks of 512 are those of 1,024 and 256."""
    plan = plan_of(tmp_path, batch=4 * len(jax.devices()), seq_len=256)
    assert size_candidates("cpu") == [
        *({"loss_chunk_tokens": size} for size in (128, 256, 1024, 2048)),
        *({"attention_block": size} for size in (32, 64, 256, 512)),
        *({"head_gradient_parts": parts} for parts in (1, 2)),
    ]
    with plan.layout.use():
        program = lambda options: trace_step(plan, plan.phases[0], sizes=options.sizes).lower().as_text()  # noqa: E731
        found = candidates_for("cpu", program)
        unsized = trace_step(plan, plan.phases[0]).lower().as_text()
        assert program(StepOptions({}, BlockSizes(512, 128))) == unsized, "the sizes before they followed from caches"
    sizes = {name: [options[name] for options in found if name in options] for name in asdict(BlockSizes())}
    parts = {"head_gradient_parts": [2]}  # one is the default in float32
    assert sizes == {"loss_chunk_tokens": [128, 256, 1024], "attention_block": [32, 64, 256], **parts}
    assert WIDE in found


def test_sizes_are_kept_with_the_options(cached, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    plan = plan_of(tmp_path)
    described = "loss_chunk_tokens=512, attention_block=128, for these caches: level 2 1 MiB, last level 32 MiB"
    assert step_options(plan).sizes == BlockSizes(512, 128)
    assert describe_sizes(plan) == described
    keep(plan, of_this_machine(plan, options={**WIDE, "loss_chunk_tokens": 256}))
    assert step_options(plan) == StepOptions(WIDE, BlockSizes(256, 128))
    assert describe_sizes(plan) == "loss_chunk_tokens=256, attention_block=128, tuned"
    kept = "xla_cpu_prefer_vector_width=512, loss_chunk_tokens=256: 1.20 times as fast as without"
    assert describe_options(plan).startswith(kept)
    monkeypatch.setattr(options_module, "processor", lambda: "Intel Xeon 6/106/6, 2 cores")
    assert step_options(plan).sizes == BlockSizes(512, 128)
    assert describe_sizes(plan) == described
    assert "tuned on another machine" in describe_options(plan)
    assert "not used on Intel Xeon 6/106/6, 2 cores" in describe_options(plan)


@pytest.mark.parametrize("difference", [{"processor": "Intel Xeon 6/85/7, 2 cores"}, {"jaxlib": "0.0.1"}])
def test_tuned_options_of_another_machine_are_reported_but_not_used(tmp_path, difference):
    plan = plan_of(tmp_path)
    keep(plan, of_this_machine(plan, **difference))
    assert step_options(plan) == by_cache()
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
def test_a_damaged_file_is_ignored(tmp_path, content):
    plan = plan_of(tmp_path)
    (tmp_path / "tuned_options.json").write_bytes(content)
    assert tuned_options(plan) is None
    assert step_options(plan) == by_cache()
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
        {"options": {"loss_chunk_tokens": 0}},
        {"options": {"loss_chunk_tokens": True}},
        {"options": {"loss_chunk_tokens": "256"}},
        {"options": {"attention_block": 2**40}},
        {"options": {"attention_block": None}},
    ],
)
def test_a_damaged_entry_of_this_machine_is_not_used(tmp_path, damage):
    plan = plan_of(tmp_path)
    entry = asdict(of_this_machine(plan)) | damage
    (tmp_path / "tuned_options.json").write_text(json.dumps([entry]))
    assert step_options(plan) == by_cache()
    assert "looks for faster ones" in (describe_options(plan) or "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup", "3"], "Remove --warmup"),
        (["--steps", "3"], "--steps: 3 given, but --tune compares at least 6"),
        (["--trainer.compilation_cache_dir", "null"], "trainer.compilation_cache_dir: None given"),
        (["--trainer.compilation_cache_dir", "gs://bucket/x"], "in a local folder"),
        (["--trainer.distributed", "{coordinator_address: 'a:1', num_processes: 2, process_id: 0}"], "one process"),
    ],
)
def test_conflicting_arguments_are_refused(arguments, message, capsys):
    check_arguments(arguments, message, capsys)


def check_arguments(arguments, message, capsys):
    assert bench.main(["--tune", "--trainer.seed", "1", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert bench.main(["--tune", "true", "--trainer.seed", "1", *arguments]) == 2  # as other switches are written
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_saves_the_options_it_finds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = {"cpu": (WIDE, {"xla_cpu_enable_wishful_thinking": True})}
    monkeypatch.setattr("jaxlm.session.compilation.tuning.CANDIDATES", few)
    monkeypatch.setattr(
        "jaxlm.session.compilation.tuning.size_candidates", lambda platform: [{"loss_chunk_tokens": 16}]
    )
    words = [f"--model.{name}={value}" for name, value in {**MODEL, "num_kv_heads": 4}.items()]
    assert (
        bench.main(["--tune", "--steps", "6", "--trainer.train_batch_size", "8", "--data.vocab_size", "300", *words])
        == 0
    )
    shown = capsys.readouterr().out
    assert "xla_cpu_enable_wishful_thinking=true: cannot be used: INVALID_ARGUMENT: No such compile option" in shown
    assert "xla_cpu_prefer_vector_width=512: " in shown
    assert "loss_chunk_tokens=16: " in shown
    assert re.search(
        r"trainer\.mp: p=f32,c=bfloat16 would be \d+\.\d\d times as fast \(.*set it in the configuration", shown
    )
    last = json.loads(shown.splitlines()[-1])
    assert json.loads((tmp_path / "cache" / "xla" / "tuned_options.json").read_text()) == [last]
