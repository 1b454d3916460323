"""CORE: the same answers as a transcription that scores one question at a time, on one device and on eight."""

import functools
import io
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxlm.commands import evaluate, prepare
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import parse_precision
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.evals.base import EvalContext
from jaxlm.evals.batches import BatchedModel, Scored
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import Inputs, vocab_axis
from jaxlm.objectives.next_token import score_batch
from jaxlm.systems.nanochat.core_bundle import CORE_TASKS, CoreTask, asked_lines, fetch_bundle, read_bundle
from jaxlm.systems.nanochat.core_eval import (
    CoreEvalConfig,
    CoreResult,
    core_metrics,
    fewshot_numbers,
    is_correct,
    open_core,
    prompts,
    scored_tokens,
)
from tests.answers import write_model
from tests.data.helpers import small_tokenizer
from tests.engine.helpers import layout, one_device
from tests.systems.nanochat.core_bundles import kind_of, reference_answers, write_bundle

GOLDEN = json.loads((Path(__file__).parents[2] / "vectors" / "core_rng.json").read_text())
# Every prompt with examples is longer than this, which a model with rotary embeddings may be asked all the same.
LLAMA = LlamaConfig(seq_len=16, hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=4, initializer_range=0.3)
GPT2 = Gpt2Config(seq_len=64, hidden_dim=32, num_layers=1, num_heads=4, initializer_range=0.3)
LONGEST = 512


KINDS = ("multiple_choice", "schema", "language_modeling")
SOME = ["coqa", "winograd", "arc_easy", "hellaswag", "squad", "hellaswag_zeroshot"]
small = functools.cache(small_tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return small()


@functools.cache
def model_of(config):
    return jax.jit(lambda: config.build(vocab_axis(small().vocab_size), key=jax.random.key(0)))()


@functools.cache
def log_probs_of(config, length):
    return log_probs_of_model(model_of(config), length)


def log_probs_of_model(model, length):
    """float64 log-probabilities after each token of one sequence, which is padded on the right."""

    @jax.jit
    def logits(ids):
        axes = (hax.Axis("batch", 1), hax.Axis("position", length))
        columns = (ids[None], jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
        return model.logits(model.hidden(Inputs(*(hax.named(c, axes) for c in columns))).final).array[0]

    def of(row):
        scores = np.asarray(logits(jnp.asarray(np.pad(row, (0, length - len(row))).astype(np.int32))), np.float64)
        scores = scores[: len(row)] - scores[: len(row)].max(-1, keepdims=True)
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    return of


def likely_continuations(tokenizer):
    """Questions without examples, every other one with the continuation that greedy decoding writes."""
    log_probs, questions = log_probs_of(LLAMA, LONGEST), []
    for number in range(200):
        context = f"{number} trees of Paris"
        ids = tokenizer.encode(context)
        best = int(log_probs([tokenizer.bos_id, *ids])[-1].argmax())
        text = tokenizer.decode([best])
        if text.strip() and tokenizer.encode(context + text) == [*ids, best]:
            questions.append({"context": context, "continuation": text if len(questions) % 2 else " zz"})
        if len(questions) == 12:
            break
    assert len(questions) >= 4
    return questions


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, tokenizer):
    return write_bundle(tmp_path_factory.mktemp("core") / "b", questions={"coqa": likely_continuations(tokenizer)})


def sharded(config, where):
    """The model with its parameters as those of a run."""
    place = lambda a: hax.NamedArray(jax.device_put(a.array, where.parameter_sharding(a.axes)), a.axes)  # noqa: E731
    return jax.tree.map(place, model_of(config), is_leaf=lambda x: isinstance(x, hax.NamedArray))


def answers(bundle, config, where, **options):
    core = open_core(CoreEvalConfig(bundle=str(bundle), **options), small())
    with where.use():
        return {name: result.correct.tolist() for name, result in core.run(sharded(config, where)).items()}


def expected(bundle, config, tokenizer, names=CORE_TASKS, **options):
    read = functools.partial(reference_answers, bundle, encode=tokenizer.encode, bos=tokenizer.bos_id)
    log_probs = log_probs_of(config, options.get("max_tokens") or LONGEST)
    return {name: read(name=name, log_probs=log_probs, **options) for name in names}


def test_questions_and_examples_are_those_of_the_reference():
    order = GOLDEN["shuffle1337_of_range10"]
    assert asked_lines(10, None) == order
    assert asked_lines(10, 6) == order[:6]
    assert fewshot_numbers(3, 10, 5) == GOLDEN["fewshot_idx3_of_10_n5"]


@pytest.mark.soak
def test_every_answer_is_that_of_one_question_at_a_time(bundle, tokenizer):
    """All tasks: three types with 0 to 10 examples, on eight devices, and in other batches on one device."""
    found = expected(bundle, LLAMA, tokenizer)
    assert list(found) == list(CORE_TASKS)
    right = {kind: {a for name in SOME if kind_of(name) == kind for a in found[name]} for kind in KINDS}
    assert right == {kind: {True, False} for kind in KINDS}
    assert answers(bundle, LLAMA, layout()) == found
    assert answers(bundle, LLAMA, one_device(), batch_size=3) == found


@pytest.mark.slow
def test_a_limit_comes_before_the_choice_of_examples(bundle, tokenizer):
    names = ["jeopardy", "copa", "winograd"]
    found = answers(bundle, LLAMA, layout(), tasks=names, max_per_task=11)
    assert found == expected(bundle, LLAMA, tokenizer, names, max_per_task=11)


@pytest.mark.slow
def test_a_model_with_a_table_of_positions_reads_the_end_of_a_prompt(bundle, tokenizer):
    names = ["arc_easy", "winograd", "bigbench_repeat_copy_logic"]
    found = expected(bundle, GPT2, tokenizer, names, max_tokens=GPT2.seq_len)
    assert answers(bundle, GPT2, layout(), tasks=names) == found
    [task] = read_bundle(str(bundle), ["arc_easy"])
    longest = max(len(tokenizer.encode(text)) for number in range(12) for text in prompts(task, number))
    assert longest > GPT2.seq_len


def test_scored_tokens():
    """The common beginning, the common end, and what follows the text without the answer."""

    def pairs(kind, *rows):
        return [tuple(map(list, pair)) for pair in scored_tokens(kind, [np.array(row) for row in rows])]

    assert pairs("multiple_choice", [9, 1, 2, 3], [9, 1, 4], [9, 1]) == [([9, 1], [2, 3]), ([9, 1], [4]), ([9, 1], [])]
    assert pairs("schema", [9, 1, 2, 5, 6], [9, 3, 5, 6]) == [([9, 1, 2], [5, 6]), ([9, 3], [5, 6])]
    assert pairs("schema", [9, 1], [9, 1]) == [([9, 1], []), ([9, 1], [])]
    assert pairs("language_modeling", [9, 1], [9, 1, 2, 3]) == [([9, 1], [2, 3])]
    assert pairs("language_modeling", [9, 1, 7], [9, 1, 2, 3]) == [([9, 1], [2, 3])]  # 7 and the answer became 2, 3


def test_the_lowest_mean_wins():
    score = lambda nats, num: (Scored(-nats, False), num)  # noqa: E731
    assert is_correct("multiple_choice", 1, [score(3.0, 1), score(4.0, 2), score(9.0, 4)])
    assert is_correct("schema", 0, [score(4.0, 2), score(4.0, 2)])  # the first of equal ones
    # min() of Python, with NaN for a choice without tokens of its own
    assert is_correct("multiple_choice", 0, [score(0.0, 0), score(1.0, 1)])
    assert is_correct("multiple_choice", 1, [score(2.0, 1), score(1.0, 1), score(0.0, 0)])


def test_accuracies_are_centered_and_averaged():
    """Of 25 questions, n are answered in task n, where guessing answers 2 % of n."""
    tasks = [CoreTask(name, "schema", [], 0, " ", 0.02 * n) for n, name in enumerate(CORE_TASKS)]
    right = [np.arange(25) < n for n in range(22)]
    results = {t.name: CoreResult(r, t.centered(r.mean())) for t, r in zip(tasks, right, strict=True)}
    found = core_metrics(results)
    centered = [(0.04 * n - 0.02 * n) / (1 - 0.02 * n) for n in range(22)]
    assert [found[f"core/{name}"] for name in CORE_TASKS] == pytest.approx(centered, rel=1e-12)
    assert [found[f"core/{name}/accuracy"] for name in CORE_TASKS] == [n / 25 for n in range(22)]
    assert found["core"] == pytest.approx(sum(centered) / 22, rel=1e-12)
    del results["copa"]
    assert "core" not in core_metrics(results)


@pytest.mark.slow
def test_the_evaluation_of_a_run_logs_every_task(bundle, tokenizer):
    seen = []
    where, names = layout(), ["copa", "winograd"]
    context = EvalContext(
        where, parse_precision("f32"), tokenizer, np.zeros(1, np.int32), (), print, 16, score_batch,
        progress=lambda: seen.append(1),
    )  # fmt: skip
    with where.use():
        found = CoreEvalConfig(bundle=str(bundle), tasks=names).open(context).run(sharded(LLAMA, where))
    right = answers(bundle, LLAMA, where, tasks=names)
    for name in names:
        accuracy = sum(right[name]) / len(right[name])
        baseline = 0.04 * CORE_TASKS.index(name)
        assert found[f"core/{name}/accuracy"] == accuracy
        assert found[f"core/{name}"] == pytest.approx((accuracy - baseline) / (1 - baseline))
    assert len(found) == 4
    assert len(seen) >= 4


@pytest.mark.slow
def test_fields(bundle, tokenizer, monkeypatch):
    """What is scored, in which batches."""
    calls = []

    def fake(self, pairs, max_length):
        calls.append((self.batch_size, len(pairs)))
        return [Scored(-1.0, False) for _ in pairs]

    monkeypatch.setattr(BatchedModel, "score", fake)
    usual = open_core(CoreEvalConfig(bundle=str(bundle), tasks=["winograd"]), tokenizer).run(model_of(LLAMA))
    assert (list(usual), calls) == (["winograd"], [(16, 24)])
    options = {"tasks": ["copa", "jeopardy"], "max_per_task": 7, "batch_size": 5}
    other = open_core(CoreEvalConfig(bundle=str(bundle), **options), tokenizer).run(model_of(LLAMA))
    assert (list(other), [len(one.correct) for one in other.values()]) == (["copa", "jeopardy"], [7, 7])
    assert {size for size, _ in calls[1:]} == {5}
    assert len(open_core(CoreEvalConfig(bundle=str(bundle)), tokenizer).run(model_of(LLAMA))) == 22


def damaged(bundle, tmp_path, change):
    folder = tmp_path / "damaged"
    shutil.copytree(bundle, folder)
    change(folder)
    return folder


def edit(file, old, new):
    def change(folder):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "core.yaml").unlink(), r"it has no core\.yaml\. To download .* jaxlm prepare --core_bundle"),
        (lambda f: (f / "eval_meta_data.csv").unlink(), r"it has no eval_meta_data\.csv"),
        (lambda f: (f / "eval_data/some/copa.jsonl").unlink(), r"lacks 1 of the tasks of CORE: copa \(no file .*copa"),
        (
            edit("core.yaml", "label: squad", "label: squat"),
            r"lacks 1 of the tasks of CORE: squad \(not in core\.yaml\)",
        ),
        (edit("eval_meta_data.csv", "\nboolq", "\nboo"), r"CORE: boolq \(not in eval_meta_data\.csv\)"),
        (edit("eval_meta_data.csv", "Random baseline", "Random"), r"eval_meta_data\.csv is damaged .*: the columns"),
        (
            edit("eval_meta_data.csv", "copa,some,20.0", "copa,some,105"),
            r"is damaged \('copa': 105\): .* 0 or more and below 100\) expected",
        ),
        (edit("core.yaml", "icl_tasks", "tasks"), r"core\.yaml is damaged: a list `icl_tasks`"),
        (
            edit("core.yaml", "icl_task_type: schema", "icl_task_type: essay"),
            r"needs icl_task_type \(multiple_choice, sc",
        ),
        (
            edit("eval_data/some/copa.jsonl", '"gold": ', '"gold": 9'),
            r"copa\.jsonl, line 1: not a question of the type",
        ),
        (
            edit("eval_data/some/squad.jsonl", '{"context"', '{"text"'),
            r"squad\.jsonl, line 1: .* context, continuation",
        ),
        (edit("eval_data/some/piqa.jsonl", "{", ""), r"piqa\.jsonl, line 1: not a question"),
    ],
)
def test_a_damaged_bundle_is_refused_and_the_message_names_the_task(bundle, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        read_bundle(str(damaged(bundle, tmp_path, change)))


def test_impossible_options_are_refused(bundle, tokenizer):
    def opened(tokenizer=tokenizer, **options):
        open_core(CoreEvalConfig(bundle=str(bundle), **options), tokenizer)

    with pytest.raises(ConfigError, match=r"tasks: 'hella' given, but CORE has: hellaswag_zeroshot, "):
        opened(tasks=["hella"])
    with pytest.raises(
        ConfigError, match=r"puts 10 other .* only 10 questions \(max_per_task: 10\)\. Set .* to 11 or more"
    ):
        opened(max_per_task=10)
    with pytest.raises(ConfigError, match="neither BOS nor EOS"):
        opened(SimpleNamespace(bos_id=None, eos_id=None))


def zipped(bundle, path, top="eval_bundle/"):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(bundle.rglob("*")):
            archive.write(file, top + str(file.relative_to(bundle)))
        archive.writestr("__MACOSX/eval_bundle/._core.yaml", "x")
    return path.as_uri()


def test_the_bundle_is_fetched_whole_or_not_at_all(bundle, tmp_path, monkeypatch, capsys):
    url = zipped(bundle, tmp_path / "a.zip")
    lines = []
    fetch_bundle(str(tmp_path / "new" / "core"), lines.append, url)
    assert [t.name for t in read_bundle(str(tmp_path / "new" / "core"))] == list(CORE_TASKS)
    assert lines[0] == f"downloading {url}"
    with pytest.raises(ConfigError, match="exists already"):
        fetch_bundle(str(tmp_path / "new" / "core"), lines.append, url)
    (tmp_path / "cut.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:-400])
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "x")
    with zipfile.ZipFile(tmp_path / "flipped.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("core.yaml", "text of a file " * 100)
    content = bytearray((tmp_path / "flipped.zip").read_bytes())
    content[39:44] = b"\xff" * 5  # in the first block of the compressed member
    (tmp_path / "flipped.zip").write_bytes(content)
    with pytest.raises(ConfigError, match=r"'gs://b/x' given, a local folder expected"):
        fetch_bundle("gs://b/x", lines.append, url)
    with pytest.raises(ConfigError, match="cannot be fetched"):
        fetch_bundle(str(tmp_path / "b"), lines.append, (tmp_path / "flipped.zip").as_uri())
    for file, message in (("cut", "cannot be fetched"), ("absent", "cannot be fetched"), ("other", "has no core.yaml")):
        with pytest.raises(ConfigError, match=message):
            fetch_bundle(str(tmp_path / "b"), lines.append, (tmp_path / f"{file}.zip").as_uri())
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob(".b-*"))
    monkeypatch.setattr("jaxlm.systems.nanochat.core_bundle._download", no_network)
    monkeypatch.chdir(tmp_path)
    assert prepare.main(["--core_bundle", "c"]) == 2
    err = capsys.readouterr().err
    assert "the bundle cannot be fetched (no network). Check the network and the disk; or download https://" in err
    assert "Traceback" not in err


def no_network(url, path):
    raise OSError("no network")


def test_a_download_that_ends_early_is_noticed(monkeypatch, tmp_path):
    short: Any = io.BytesIO(b"12345")
    short.headers = {"Content-Length": "10"}
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: short)
    with pytest.raises(ConfigError, match="5 of 10 bytes were read"):
        fetch_bundle(str(tmp_path / "b"), print, "https://example.org/b.zip")


def command(bundle, monkeypatch, *options):
    where = layout()
    named = SimpleNamespace(
        model=SimpleNamespace(is_causal=True), plan=SimpleNamespace(layout=where), location="m", tokenizer=small(),
        for_inference=lambda quantize: sharded(LLAMA, where), check_predicts_next_tokens=lambda option: None,
    )  # fmt: skip
    monkeypatch.setattr("jaxlm.systems.nanochat.command_parts.open_model", lambda *arguments: named)
    return evaluate.main(["--checkpoint", "m", "--core_bundle", str(bundle), *options])


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(bundle, tokenizer, monkeypatch, capsys):
    names = ["copa", "winograd"]
    tasks = ",".join(f"core/{name}" for name in names)
    assert command(bundle, monkeypatch, "--tasks", tasks, "--limit", "11") == 0
    *table, line = capsys.readouterr().out.splitlines()
    right = answers(bundle, LLAMA, layout(), tasks=names, max_per_task=11)
    found = json.loads(line)
    assert (found["model"], found["core"], list(found["tasks"])) == ("m", None, names)
    for name, row in zip(names, table[1:], strict=True):
        accuracy = sum(right[name]) / 11
        assert (found["tasks"][name]["accuracy"], found["tasks"][name]["questions"]) == (accuracy, 11)
        assert row.split()[:3] == [name, "11", f"{accuracy:.4f}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "core,arc_easy"), "expected either core, or core/TASK"),
        (("--tasks", "core", "--num_fewshot", "3"), "--num_fewshot has no effect with --tasks core"),
        (("--tasks", "core", "--limit", "0"), "--limit: 0 given, must be at least 1"),
        (("--tasks", "core", "--batch_size", "0"), "--batch_size: 0 given, must be at least 1"),
        (("--tasks", "core/copy"), "tasks: 'copy' given, but CORE has"),
        (("--tasks", "arc_easy"), "--core_bundle has no effect without --tasks core"),
        ((), "--core_bundle has no effect without --tasks core"),
    ],
    ids=str,
)
def test_options_of_the_command_are_checked(bundle, monkeypatch, capsys, options, message):
    assert command(bundle, monkeypatch, *options) == 2
    assert message in capsys.readouterr().err


def test_core_without_a_bundle_says_how_to_get_one(capsys):
    assert evaluate.main(["--checkpoint", "m", "--tasks", "core"]) == 2
    assert "run jaxlm prepare --core_bundle FOLDER" in capsys.readouterr().err


def test_core_has_22_tasks():
    assert len(CORE_TASKS) == len(set(CORE_TASKS)) == 22


@pytest.mark.slow
def test_the_command_gives_the_accuracies_of_torch(tmp_path, capsys):
    """Llama and tokenizer of transformers, in float64, one text at a time: 22 tasks, 12 questions each."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, bundle = write_model(tmp_path / "hf", max_position_embeddings=64), write_bundle(tmp_path / "b", num=12)
    assert evaluate.main(["--checkpoint", str(folder), "--tasks", "core", "--core_bundle", str(bundle)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def log_probs(row):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([row])).logits[0], -1).numpy()

    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    centered = []
    for number, name in enumerate(CORE_TASKS):
        right = reference_answers(bundle, name, encode, tokenizer.bos_token_id, log_probs)
        assert found["tasks"][name]["accuracy"] == sum(right) / 12, name
        centered.append((sum(right) / 12 - 0.04 * number) / (1 - 0.04 * number))
    assert found["core"] == pytest.approx(sum(centered) / 22, rel=1e-9)


SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.soak
@pytest.mark.skipif(not (SHARED / "core").is_dir(), reason="the tasks of CORE are not here")
def test_real_questions_with_a_real_tokenizer(tmp_path):
    """Seven tasks with the settings of the bundle, GPT-2's tokenizer, and 12 questions each."""
    tokenizer, folder = load_tokenizer(str(SHARED / "gpt2_tokenizer")), tmp_path / "b"
    files = {
        "arc_easy": ("arc_easy", "multiple_choice", "\nAnswer: "),
        "copa": ("copa", "multiple_choice", " "),
        "piqa": ("piqa", "multiple_choice", "\nAnswer: "),
        "winograd": ("winograd_wsc", "schema", " "),
        "lambada_openai": ("lambada_openai", "language_modeling", " "),
        "jeopardy": ("jeopardy_small", "language_modeling", "\nAnswer: "),
        "bigbench_repeat_copy_logic": ("bigbench_repeat_copy_logic", "language_modeling", " "),
    }
    (folder / "eval_data").mkdir(parents=True)
    entries = []
    for name, (file, kind, delimiter) in files.items():
        shutil.copy(SHARED / "core" / f"{file}.jsonl", folder / "eval_data")
        entry = {"label": name, "dataset_uri": f"{file}.jsonl", "num_fewshot": [3], "icl_task_type": kind}
        entries.append({**entry, "continuation_delimiter": delimiter})
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    rows = "".join(f"{name},25\n" for name in files)
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\n{rows}")
    core = open_core(CoreEvalConfig(bundle=str(folder), tasks=list(files), max_per_task=12), tokenizer)
    config = replace(LLAMA, num_layers=1)
    model = jax.jit(lambda: config.build(vocab_axis(tokenizer.vocab_size), key=jax.random.key(0)))()
    log_probs = log_probs_of_model(model, 2048)
    assert tokenizer.bos_id is not None
    with layout().use():
        found = {name: result.correct.tolist() for name, result in core.run(model).items()}
    for name in files:
        read = functools.partial(reference_answers, folder, encode=tokenizer.encode, bos=tokenizer.bos_id)
        assert found[name] == read(name=name, log_probs=log_probs, max_per_task=12), name
