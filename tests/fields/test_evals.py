"""The effect of the fields of evaluations: when they run, on which batches, and with which arguments."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.data import ValidationData
from jaxlm.data.packing import PackedSequences
from jaxlm.data.tokens import TokensConfig
from jaxlm.engine.activity import ActivityClock
from jaxlm.engine.metrics import Totals
from jaxlm.evals import batches, harness
from jaxlm.evals.base import EvalConfig, EvalContext
from jaxlm.models.base import vocab_axis
from jaxlm.objectives.next_token import score_batch
from jaxlm.observe.callbacks import Callbacks
from jaxlm.observe.console import Console
from jaxlm.observe.hooks import EvalHook, Generated, ScheduledEval
from jaxlm.observe.loop_state import LoopState
from jaxlm.plan.plan import Plan
from jaxlm.session.phase import open_evaluations
from jaxlm.session.run import RunRecords
from tests.data.helpers import cache_of
from tests.fields.proofs import Outcome, outcome_of
from tests.fields.trees import merged, tree

SAMPLING = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "cache_dtype"]
# tool: tests/session/test_chat.py, denoising: tests/models/test_denoise.py
SAMPLES = [*SAMPLING, "prompts", "max_new_tokens", "tool", "denoising"]
HARNESS = ["tasks", "task_folder", "num_fewshot", "limit", "batch_size"]
GATES = {  # tests/evals/test_gates.py, tests/evals/test_written.py, tests/evals/test_needle.py, tests/session/test_gates.py
    "compare": ["reference", "batches", "attention", "logits"],
    "fidelity": ["reference", "batches", "max_delta_nll", "max_ppl_ratio"],
    "cases": ["cases", "file", "reference", "max_new_tokens", "min_student_accuracy", "max_accuracy_drop"],
    "continuations": ["reference", "prompts", "prompt_tokens", "max_new_tokens", "min_agreement", "max_delta_nll"],
    "needle": [  # tests/evals/test_needle.py
        *("lengths", "depths", "num_samples", "needle", "question", "digits", "seed", "batch_size", "min_accuracy"),
    ],
}
CORE = ["bundle", "tasks", "max_per_task", "batch_size"]  # tests/systems/nanochat/test_core.py

ROLLOUTS = [  # tests/systems/rl/test_evaluation.py
    *(*SAMPLING, "prompts_file", "rewards", "prompt_key", "messages_key", "max_prompts", "num_samples"),
    *("max_new_tokens", "stop_tokens", "batch_size", "reward_timeout_s", "name"),
]


def test_every_field_of_an_eval_is_listed():
    choices = EvalConfig.get_known_choices()
    fields = {kind: [field.name for field in dataclasses.fields(choices[kind])] for kind in choices}
    own = {
        "loss": [],
        "samples": SAMPLES,
        "harness": HARNESS,
        "preference": [],
        "entropy": [],
        "core": CORE,
        "objective": [],
        "rollouts": ROLLOUTS,
        **{kind: ["phases", "name", "fail_fast", *names] for kind, names in GATES.items()},
    }
    assert fields == {kind: ["every", *names] for kind, names in own.items()}


def run_of(plan: Plan, tokenizer: Any) -> Any:
    """What evaluations need of an open run."""
    console = Console()
    records = RunRecords(plan, console, LoopState(), Totals(), Callbacks({}, print))
    names = {"tokenizer": tokenizer, "saved_tokenizer": tokenizer, "clock": ActivityClock()}
    return SimpleNamespace(plan=plan, console=console, records=records, **names)


@pytest.fixture
def eval_hook(monkeypatch):
    """The hook of a run with these `trainer` keys, and the context in which its evaluation was opened."""
    sequences = PackedSequences(cache_of([[1] * 40 for _ in range(60)], 64), 16)
    source: Any = SimpleNamespace(name="", config=SimpleNamespace(tags=[]))
    data: Any = SimpleNamespace(validation=[ValidationData(source, sequences, TokensConfig().batch_spec(16))])
    tokenizer = SimpleNamespace(known_token_bytes=lambda log: np.ones(64, np.int32), dummy_prefix=lambda: None)
    opened: list[EvalContext] = []
    loss = EvalConfig.get_known_choices()["loss"]
    monkeypatch.setattr(loss, "open", lambda self, context: opened.append(context))

    def make(**trainer: Any) -> tuple[Any, EvalContext]:
        plan = Outcome(merged(tree(), {"trainer": trainer})).plan
        hook = open_evaluations(run_of(plan, tokenizer), plan.phases[0], data, {})
        return hook, opened.pop()

    return make


def test_steps_per_eval(eval_hook):
    hook, _ = eval_hook(steps_per_eval=40)
    assert [step for step in range(1, 101) if hook.due(step)] == [40, 80, 100]


def test_every(eval_hook):
    hook, _ = eval_hook(steps_per_eval=10)
    assert [step for step in range(1, 101) if hook.due(step)] == [*range(10, 101, 10)]
    counts: dict[str, list[int]] = {"loss": [], "core": []}
    state: Any = SimpleNamespace(model=None)
    phase: Any = SimpleNamespace(end=45, averaged=lambda state: {})

    def evaluation(name: str) -> Any:
        return SimpleNamespace(run=lambda model: counts[name].append(now) or {name: 1.0})

    evals = [ScheduledEval(evaluation("loss"), 1), ScheduledEval(evaluation("core"), 2)]
    console: Any = SimpleNamespace(log=lambda line: None)
    both, rare = (EvalHook(own, 10, phase, (), console, Generated()) for own in (evals, evals[1:]))
    assert [step for step in range(1, 46) if rare.due(step)] == [20, 40, 45]
    for now in (step for step in range(1, 46) if both.due(step)):
        both.run(now, state)
    assert counts == {"loss": [10, 20, 30, 40, 45], "core": [20, 40, 45]}
    assert set(both.latest) == {"eval/loss", "eval/core"}


def shapes(context: EvalContext) -> list[tuple[int, ...]]:
    return [batch.tokens.array.shape for batch in context.validation[0].batches()]


def test_max_eval_batches(eval_hook):
    _, usual = eval_hook()
    assert len(shapes(usual)) == 10  # 60 documents of 40 tokens in sequences of 16, 16 per batch
    _, few = eval_hook(max_eval_batches=3)
    assert len(shapes(few)) == 3


def test_per_device_eval_parallelism(eval_hook):
    _, usual = eval_hook()
    assert set(shapes(usual)) == {(16, 16)}
    _, larger = eval_hook(per_device_eval_parallelism=4)
    assert set(shapes(larger)) == {(32, 16)}


def test_the_eval_hook_runs_the_configured_evals(eval_hook, monkeypatch):
    opened: list[str] = []
    for kind in ("loss", "samples"):
        config = EvalConfig.get_known_choices()[kind]
        monkeypatch.setattr(config, "open", lambda self, context: opened.append(type(self).__name__))
    plan = Outcome(tree(evals=[{"type": "samples"}, {"type": "loss"}])).plan
    tokenizer = SimpleNamespace(known_token_bytes=lambda log: np.ones(64, np.int32), dummy_prefix=lambda: None)
    data: Any = SimpleNamespace(validation=[])
    open_evaluations(run_of(plan, tokenizer), plan.phases[0], data, {})
    assert opened == ["SamplesEvalConfig", "LossEvalConfig"]


def test_harness_fields(monkeypatch):
    """The arguments and the backend that the harness is called with."""
    folders: list[Any] = []
    calls: list[dict[str, Any]] = []

    def manager(include_path: Any) -> Any:
        folders.append(include_path)
        return SimpleNamespace(all_tasks=["a", "b"], load=lambda tasks: {"tasks": {}})

    monkeypatch.setattr(harness, "_harness", lambda: (lambda **call: calls.append(call) or {"results": {}}, manager))
    monkeypatch.setattr(harness, "_backend", lambda model, tokenizer: f"batches of {model.batch_size}")
    fields = {"tasks": ["b"], "task_folder": "elsewhere", "num_fewshot": 2, "limit": 3, "batch_size": 5}
    assert list(fields) == HARNESS
    for config in (harness.HarnessEvalConfig(tasks=["a"]), harness.HarnessEvalConfig(**fields)):
        harness.open_tasks(config, 32).run(None, None)  # pyright: ignore
    assert folders == [None, "elsewhere"]
    names = ("tasks", "num_fewshot", "limit", "model")
    assert [calls[0][name] for name in names[:3]] == [["a"], None, None]
    assert [calls[1][name] for name in names] == [["b"], 2, 3, "batches of 5"]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The lines that the evaluation `samples` prints for a model with random weights, which is built once."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "a.txt").write_text("abcd " * 200)
    data = TokensConfig(train_urls=[f"{folder}/a.txt"], cache_dir=f"{folder}/c", vocab_size=260)
    tokenizer = data.corpus.load_tokenizer(log=lambda _: None)
    plan = outcome_of(tree()).plan
    build = lambda: plan.state_builder.model.build(vocab_axis(tokenizer.vocab_size), key=jax.random.key(0))  # noqa: E731
    model = jax.jit(lambda: jax.tree.map(lambda x: x * 20, build()))()

    def sample(**fields: Any) -> str:
        lines: list[str] = []
        context = EvalContext(
            plan.layout, plan.precision, tokenizer, tokenizer.token_bytes(), (), lines.append, 32, score_batch
        )
        config: Any = EvalConfig.get_known_choices()["samples"]
        config(**{"prompts": ["ab"], "max_new_tokens": 8, "temperature": 3.0} | fields).open(context).run(model)
        return "\n".join(lines)

    return sample


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"max_new_tokens": 31}, "Shorten the prompt, or set max_new_tokens to at most (29|30)"),
        ({"prompts": ["ab" * 40], "max_new_tokens": 1}, "Shorten the prompt"),
    ],
)
def test_samples_that_do_not_fit_are_refused_before_training(sampled, fields, advice):
    with pytest.raises(ConfigError, match=rf"together exceed model\.seq_len: 32\. {advice}$"):
        sampled(**fields)


FILLS_IN = merged(
    tree(data={"masking": {}}, objective={"type": "diffusion"}), {"model": {"use_bidirectional_attention": True}}
)


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (
            tree(),
            {"temperature": 1e-30},
            r"^evals\.0\.temperature: 1e-30 given, 0 \(greedy\) or 1e-20 to 1e\+20 expected",
        ),
        (FILLS_IN, {"temperature": 1e30}, r"^evals\.0\.temperature: 1e\+30 given, 0 \(greedy\) or 1e-20 to 1e\+20"),
        (
            FILLS_IN,
            {"max_new_tokens": 0},
            r"^evals\.0\.max_new_tokens: 0 given, an integer of 1 or more expected",
        ),
        (FILLS_IN, {"repetition_penalty": 2.0}, r"^evals: type samples: repetition_penalty: 2\.0 given, .* Remove it"),
        (
            FILLS_IN,
            {"denoising": {"num_steps": 99}, "max_new_tokens": 8},
            r"^evals: type samples: denoising\.num_steps: 99 given for 8 new tokens .* Expected 1 to 8",
        ),
        (
            FILLS_IN,
            {"denoising": {"schedule": "depth"}},
            r"^evals: type samples: denoising\.schedule: depth given, but no part",
        ),
    ],
)
def test_samples_that_a_model_cannot_generate_are_refused_in_the_plan(base, fields, message):
    refused = Outcome(base | {"evals": [{"type": "samples", **fields}]}).error
    assert re.search(message, refused), refused


@pytest.mark.slow
def test_sample_fields(sampled):
    usual, greedy = sampled(), sampled(temperature=0.0)
    assert usual == sampled()
    assert usual.startswith("  | ab")
    assert sampled(prompts=["cd", "ef"]).count("  | ") >= 2
    assert sampled(prompts=["cd"]).startswith("  | cd")
    assert usual.startswith(short := sampled(max_new_tokens=3))
    assert len(short) < len(usual)
    assert greedy != usual
    assert greedy == sampled(temperature=0.0, seed=7)
    assert sampled(top_k=1) == sampled(top_p=1e-6) == sampled(min_p=1.0) == greedy
    assert sampled(temperature=0.0, repetition_penalty=1e-6) != greedy
    assert sampled(seed=7) not in (usual, greedy)


@pytest.mark.slow
def test_the_cache_of_samples_has_the_dtype(sampled, monkeypatch):
    dtypes = []
    generate = batches.generate_tokens
    monkeypatch.setattr(
        batches, "generate_tokens", lambda *given: dtypes.append(given[2].cache_dtype) or generate(*given)
    )
    sampled()
    assert sampled(cache_dtype="int8").startswith("  | ab")
    assert dtypes == [None, "int8"]
