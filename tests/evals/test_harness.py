"""lm-evaluation-harness: the same metrics as its own backend `hf`, with the same weights and tasks."""

import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.commands import evaluate
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import parse_precision
from jaxlm.evals import harness
from jaxlm.evals.base import EvalContext
from jaxlm.evals.batches import BatchedModel
from jaxlm.evals.harness import HarnessEvalConfig
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.objectives.next_token import score_batch
from jaxlm.session.load_model import open_model
from tests.answers import CAPITALS, instructions, write_model
from tests.engine.helpers import layout

MODEL = LlamaConfig(seq_len=48, hidden_dim=32, intermediate_dim=48, num_layers=1, num_heads=4, initializer_range=0.3)
ROOT = Path(__file__).parents[2]
CORE = ROOT.parent / "shared" / "data" / "core"


@pytest.mark.slow
def test_scores_do_not_depend_on_the_batch():
    """Compared with one forward pass per pair, then float64. Contexts that are too long are truncated on the left."""
    model = jax.jit(lambda: MODEL.build(vocab_axis(61), key=jax.random.key(0)))()
    rng = np.random.default_rng(0)
    sizes = [(3, 2), (1, 7), (30, 18), (60, 5), (1, 48), (5, 1)]
    pairs = [(rng.integers(0, 61, n).tolist(), rng.integers(0, 61, m).tolist()) for n, m in sizes]

    @jax.jit
    def logits(ids):
        axes = (hax.Axis("batch", 1), hax.Axis("position", 48))
        columns = (ids[None], jnp.arange(48)[None], jnp.ones((1, 48), jnp.int32))
        return model.logits(model.hidden(Inputs(*(hax.named(c, axes) for c in columns))).final).array[0]

    expected = []
    for context, continuation in pairs:
        ids = [*context, *continuation][-49:]
        row = np.zeros(48, np.int32)
        row[: len(ids) - 1] = ids[:-1]
        scores = np.asarray(logits(jnp.asarray(row)), np.float64)[len(ids) - 1 - len(continuation) : len(ids) - 1]
        likely = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        expected.append(sum(likely[i, token] for i, token in enumerate(continuation)))
    best = int(scores[-1].argmax())
    with layout().use():
        got = BatchedModel(model, 3).score([*pairs, (pairs[-1][0], [best])])
    np.testing.assert_allclose([one.log_likelihood for one in got[:-1]], expected, rtol=1e-5, atol=1e-5)
    assert [one.is_greedy for one in got] == [*[False] * len(pairs), True]


TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_words": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{continuation}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{continuation}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{continuation}}"
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(folder):
    """Small tasks of every kind, from the real datasets if they are available, else from our own texts."""
    cities = list(CAPITALS.values())
    choices = [
        {"query": record["prompt"], "choices": [f" {city}." for city in cities], "gold": number}
        for number, record in enumerate(instructions())
    ]
    words = [{"context": r["prompt"], "continuation": r["response"]} for r in instructions()]
    words.append({"context": "a " * 400, "continuation": "long text " * 8})
    whole = [*words, {"context": "", "continuation": "long text " * 80}]
    documents = {"choice": choices, "last_words": words, "whole": whole, "written": words}
    if CORE.is_dir():
        of = lambda name: [json.loads(line) for line in (CORE / name).read_text().splitlines()[:40]]  # noqa: E731
        documents["choice"] += of("copa.jsonl")
        documents["last_words"] = words + of("jeopardy_small.jsonl")
    for name, options in TASKS.items():
        some = documents[name]
        if name == "choice":  # the same number of choices everywhere, so that pyarrow infers one type
            some = [{**doc, "choices": doc["choices"][:2], "gold": min(doc["gold"], 1)} for doc in some]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps({k: d[k] for k in some[0]}) + "\n" for d in some))
        source = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        )
        (folder / f"{name}.yaml").write_text(source + options)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Disables the hub, and removes cached data afterwards."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("torch")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def compared(folder, tasks, capsys, *options):
    """Task -> metric -> value from jaxlm; accuracies must equal those of the harness's own backend exactly."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = sorted(path.stem for path in tasks.glob("*.yaml"))
    arguments = ["--checkpoint", str(folder), "--tasks", ",".join(names), "--task_folder", str(tasks), *options]
    assert evaluate.main(arguments) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4),
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks)),
        limit=int(options[1]) if options else None,
        bootstrap_iters=0,
    )["results"]
    assert sorted(ours) == sorted(theirs) == names
    for task, metrics in ours.items():
        for name, value in metrics.items():
            if name.startswith(("acc", "exact_match")):
                assert value == theirs[task][name], (task, name)
            elif "stderr" not in name and name not in ("alias", "sample_len"):
                assert value == pytest.approx(theirs[task][name], rel=1e-4), (task, name)
    return ours


@pytest.mark.slow
def test_metrics_equal_those_of_the_harness_own_backend(tmp_path, offline, capsys):
    write_model(tmp_path / "hf", max_position_embeddings=256)
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    ours = compared(tmp_path / "hf", tmp_path / "tasks", capsys)

    named = open_model(str(tmp_path / "hf"), {})
    plan = named.plan
    context = EvalContext(
        plan.layout, plan.precision, named.tokenizer, named.tokenizer.token_bytes(), (), print, 256, score_batch
    )
    while_training = HarnessEvalConfig(tasks=["choice"], task_folder=str(tmp_path / "tasks"))
    with plan.layout.use():
        numbers = while_training.open(context).run(named.load())
    assert numbers == {f"choice/{name}": ours["choice"][f"{name},none"] for name in ("acc", "acc_norm")}


@pytest.mark.slow
@pytest.mark.skipif(not CORE.is_dir(), reason="the tasks of CORE are not here")
def test_real_tasks_with_a_real_tokenizer(tmp_path, offline, monkeypatch, capsys):
    """The tasks of `examples/tasks`: multiple choice, choice of beginnings, last words, passages, generated text."""
    import torch
    import transformers

    torch.manual_seed(0)
    shutil.copytree(CORE.parent / "gpt2_tokenizer", tmp_path / "hf", ignore=shutil.ignore_patterns("config.json"))
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "hf")
    monkeypatch.chdir(CORE.parent)
    compared(tmp_path / "hf", ROOT / "examples" / "tasks", capsys, "--limit", "12")


def opened(tasks=("written",), seq_len=48, **options):
    """Opens the evaluation as a run does, before the first step."""
    context = EvalContext(
        layout(), parse_precision("f32"), None, np.zeros(1, np.int32), (), print, seq_len, score_batch
    )
    return HarnessEvalConfig(tasks=list(tasks), **options).open(context)


def harness_with(monkeypatch, **tasks):
    """A stand-in for the harness that has only these tasks, each given by its attributes."""

    def task(marks):
        return SimpleNamespace(get_config=marks.get, **{key: True for key in marks if key.isupper()})

    def manager(include_path):
        load = lambda names: {"tasks": {name: task(tasks[name]) for name in names}}  # noqa: E731
        return SimpleNamespace(all_tasks=list(tasks), load=load)

    monkeypatch.setattr(harness, "_harness", lambda: (None, manager))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["written", "writen"]}, "no tasks named writen. Did you mean written? Do you need task_folder?"),
        ({"tasks": ["writen"], "task_folder": "mine"}, "Did you mean written? They are not in mine either"),
        ({"tasks": ["WRITTEN", "Choice"]}, "no tasks named WRITTEN, Choice. Did you mean written, choice?"),
        ({"tasks": ["no/such.yaml"]}, "has no tasks named no/such.yaml. Do you need task_folder?"),
        ({"seq_len": 12}, "tasks: written generates up to 12 tokens, but the model's maximum sequence length is 12"),
        ({"tasks": ["long"]}, "tasks: long generates up to 256 tokens, but the model's maximum sequence length is 48"),
        ({"tasks": ["code"]}, "tasks: code is not supported: it executes code that the model writes"),
    ],
    ids=str,
)
def test_impossible_tasks_are_refused_before_the_first_step(monkeypatch, options, message):
    long = {"output_type": "generate_until"}
    short = {**long, "generation_kwargs": {"max_gen_toks": 12}}
    choice = {"output_type": "multiple_choice"}
    harness_with(monkeypatch, written=short, long=long, code={**choice, "UNSAFE_CODE": True}, choice=choice)
    opened(tasks=["written", "choice"])
    with pytest.raises(ConfigError, match=re.escape(message)):
        opened(**options)


@pytest.mark.parametrize("name", ["batch_size", "limit"])
def test_a_zero_on_the_command_line_overrides_the_default(monkeypatch, capsys, name):
    harness_with(monkeypatch, choice={"output_type": "multiple_choice"})
    named = SimpleNamespace(model=MODEL, check_predicts_next_tokens=lambda option: None)
    monkeypatch.setattr("jaxlm.session.harness_tasks.open_model", lambda *options: named)
    assert evaluate.main(["--checkpoint", "hf", "--tasks", "choice", f"--{name}", "0"]) == 2
    assert f"--{name}: 0 given, an integer of 1 or more" in capsys.readouterr().err


def test_standard_errors_are_in_the_table_and_in_the_json(monkeypatch, capsys):
    """The harness computes them if it may resample; what it cannot compute is left out."""
    asked = []
    found = {
        "alias": "choice",
        "acc,none": 0.5,
        "acc_stderr,none": 0.125,
        "perplexity,none": 3.0,
        "perplexity_stderr,none": "N/A",
    }

    def simple_evaluate(**options):
        asked.append(options["bootstrap_iters"])
        return {"results": {"choice": found}}

    tasks = harness.OpenTasks(HarnessEvalConfig(tasks=["choice"]), simple_evaluate, None)
    monkeypatch.setattr(harness, "_backend", lambda *options: None)
    monkeypatch.setattr("jaxlm.session.harness_tasks.open_tasks", lambda *options: tasks)
    named = SimpleNamespace(
        plan=SimpleNamespace(layout=layout()),
        check_predicts_next_tokens=lambda option: None,
        model=MODEL,
        location="hf",
        tokenizer=None,
        for_inference=lambda quantize: None,
    )
    monkeypatch.setattr("jaxlm.session.harness_tasks.open_model", lambda *options: named)
    assert evaluate.main(["--checkpoint", "hf", "--tasks", "choice"]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert [row.split() for row in table] == [
        ["task", "metric", "value", "stderr"],
        ["choice", "acc,none", "0.5000", "0.1250"],
        ["choice", "perplexity,none", "3.0000"],
    ]
    assert json.loads(line)["tasks"]["choice"] == {k: v for k, v in found.items() if isinstance(v, float)}
    context = SimpleNamespace(tokenizer=None, cast=lambda model: model, progress=lambda: None)
    assert harness.HarnessEval(tasks, context).run({}) == {"choice/acc": 0.5, "choice/perplexity": 3.0}
    assert asked[0] >= 1000
    assert asked[1:] == [0], "during training they would cost time and are not logged"


@pytest.mark.slow
def test_tasks_of_the_real_harness_are_opened_before_the_first_step(tmp_path, offline, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    own_alone = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(harness, "_harness", lambda: (simple_evaluate, own_alone))
    write_tasks(tmp_path)
    (tmp_path / "group.yaml").write_text("group: group\ntask: [whole]\n")
    folder = {"task_folder": str(tmp_path)}
    opened(TASKS, **folder)
    opened([str(tmp_path / "written.yaml")])
    for tasks, seq_len, message in [
        (["choise"], 48, "has no tasks named choise"),
        (TASKS, 12, "written generates up to 12 tokens"),
        (["whole", "group"], 48, "Duplicate task 'whole'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            opened(tasks, seq_len, **folder)
    (tmp_path / "choice.jsonl").unlink()
    with pytest.raises(ConfigError, match="cannot load the tasks"):
        opened(["choice"], **folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--limit", "3"), "--limit has no effect without --tasks"),
        (("--tasks", "a", "--max_batches", "all"), "--max_batches has no effect with --tasks"),
    ],
    ids=str,
)
def test_options_of_the_other_mode_are_refused(options, message, capsys):
    assert evaluate.main(["--checkpoint", "nowhere", *options]) == 2
    assert message in capsys.readouterr().err
