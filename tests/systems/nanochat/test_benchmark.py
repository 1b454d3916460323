"""The benchmark of jaxlm beside nanochat: its messages and configurations, and with NANOCHAT=FOLDER all of its comparison."""

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxlm.plan.load_config import decode_run, read_config
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.nanochat.core_bundle import read_bundle

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]  # at the end, so they shadow nothing
missing = [name for name in ("torch", "psutil") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
nanochat, parity = map(importlib.import_module, ("nanochat", "nanochat_parity"))

MODELS = {"seed": "self.ve_gate_channels = 32", "head": "self.ve_gate_channels = 12\nself.smear_gate = None"}


def checkout(folder, model):
    for name in nanochat._FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(model)
    return folder


def refusal(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["nanochat.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as error:
        nanochat.main()
    return f"{error.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parity"], "FOLDER has no nanochat/gpt.py"),
        ([], "nothing to do. Give --parity, --speed, or both"),
        (["--parity", "--depths", "2,x"], "--depths: 2,x given, numbers from 2 to 32 expected"),
        (["--parity", "--bundle", "nowhere"], "--bundle: nowhere given, which is no folder"),
        (["--parity", "--questions", "10"], "--questions: 10 given, at least 11 expected"),
        (["--parity", "--row_group", "0"], "--row_group: 0 given, at least 1 expected"),
        (["--speed", "--rounds", "1"], "--rounds: 1 given, at least 2 expected"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    found = refusal(monkeypatch, capsys, "--nanochat", tmp_path, *arguments)
    assert message in found.replace(f"{tmp_path} given, but it", "FOLDER")


def test_other_revisions_are_refused(tmp_path, monkeypatch, capsys):
    folder = checkout(tmp_path, "self.ve_gate_channels = 12")
    assert "Run git checkout 92d63d4 there" in refusal(monkeypatch, capsys, "--nanochat", folder, "--parity")


@pytest.mark.parametrize("recipe", MODELS)
def test_both_sides_have_the_same_rates(recipe, tmp_path):
    """nanochat scales the rates of AdamW with the width by itself, so what it is given is without that."""
    found = nanochat.read_checkout(str(checkout(tmp_path / "checkout", MODELS[recipe])))
    assert (found.recipe, found.commit) == (recipe, "")
    peers = nanochat.speed_peers(found, tmp_path)
    options = {name: json.loads(Path(peer.command[-1]).read_text()) for name, peer in peers.items()}
    run = read_config(tmp_path / "run.yaml")
    groups = {group.match: group.learning_rate for group in run.optimizer.groups}
    theirs, scale = options["nanochat-compile"]["rates"], (256 / 768) ** -0.5
    assert groups["^head\\."] == pytest.approx(theirs["unembedding_lr"] * scale, rel=1e-12)
    assert groups["^tokens\\."] == pytest.approx(theirs["embedding_lr"] * scale, rel=1e-12)
    assert groups["x0_lambdas$"] == pytest.approx(theirs["scalar_lr"], rel=1e-12)
    assert theirs["matrix_lr"] == pytest.approx(0.02 * math.sqrt(4096 / 2**19), rel=1e-12)
    assert options["nanochat-eager"]["sizes"] == {
        "sequence_len": 512,
        "vocab_size": 32_768,
        "n_layer": 4,
        "n_head": 2,
        "n_kv_head": 2,
        "n_embd": 256,
        "window_pattern": "L",
    }
    assert options["jaxlm"]["start"] == options["nanochat-eager"]["start"]
    assert run.optimizer.orthogonalization_dtype == ("bfloat16" if recipe == "seed" else "float32")


@pytest.mark.parametrize(
    ("sizes", "depth", "heads"),
    [(parity.Sizes(), 4, 2), (parity.Sizes(640, aspect_ratio=22, head_dim=44, window_pattern="SLS"), 6, 3)],
)
def test_the_compared_run_has_the_sizes_of_nanochats(sizes, depth, heads, tmp_path):
    case = parity.Case("head", tmp_path, "head", depth, in_bfloat16=False, sizes=sizes)
    place = parity.Place(tmp_path, tmp_path / "shards", tmp_path / "tokenizer", None, 20)
    tree = parity.configuration(case, place, tmp_path, tmp_path / "start")
    tree["data"] |= {"tokenizer": "bpe", "vocab_size": parity.VOCAB}  # there is no tokenizer here
    run = decode_run(ConfigSource(tree), "run")
    theirs = dict(argument.removeprefix("--").split("=") for argument in parity.base_train_arguments(case))
    assert run.trainer.train_batch_size * run.model.seq_len == int(theirs["total-batch-size"])
    assert run.trainer.max_per_device_parallelism == int(theirs["device-batch-size"])
    assert run.trainer.num_train_steps == int(theirs["num-iterations"])
    assert run.trainer.max_eval_batches * parity.ROWS * run.model.seq_len == int(theirs["eval-tokens"])
    assert (run.model.num_layers, run.model.num_heads, run.optimizer.warmup) == (
        depth,
        heads,
        int(theirs["warmup-steps"]),
    )
    assert run.model.seq_len == int(theirs["max-seq-len"])
    assert run.model.window_pattern == theirs.get("window-pattern", run.model.window_pattern)
    assert run.model.hidden_dim == depth * int(theirs.get("aspect-ratio", 64))


def test_a_bundle_is_made_of_loose_files(tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    questions = {
        "jeopardy_small": {"context": "A: b", "continuation": "c"},
        "winograd_wsc": {"context_options": ["a", "b"], "continuation": "c", "gold": 1},
        "copa": {"query": "a", "choices": ["b", "c"], "gold": 0},
    }
    for name, question in questions.items():
        (loose / f"{name}.jsonl").write_text(f"{json.dumps(question)}\n" * 12)
    bundle = parity.complete_bundle(loose, tmp_path / "bundle")
    tasks = {task.name: task for task in read_bundle(str(bundle), ["copa", "jeopardy", "winograd"])}
    assert [(task.kind, task.num_fewshot, task.delimiter) for task in tasks.values()] == [
        ("multiple_choice", 0, " "),
        ("language_modeling", 10, "\nAnswer: "),
        ("schema", 0, " "),
    ]
    assert parity.complete_bundle(bundle, tmp_path / "other") == bundle
    place = parity.Place(tmp_path, tmp_path, tmp_path, bundle, 12)
    assert place.tasks["winograd"] == "winograd_wsc.jsonl 0"
    assert yaml.safe_load((bundle / "core.yaml").read_text())["icl_tasks"][0]["label"] == "copa"
    with pytest.raises(SystemExit, match=r"has neither core\.yaml nor a \.jsonl file of a task of CORE"):
        parity.complete_bundle(tmp_path / "checkout", tmp_path / "third")


def test_a_question_that_nanochat_refuses_is_not_counted(tmp_path):
    (tmp_path / "core.yaml").write_text(
        yaml.safe_dump({"icl_tasks": [{"label": "copa", "dataset_uri": "copa.jsonl", "num_fewshot": [0]}]})
    )
    place = parity.Place(tmp_path, tmp_path, tmp_path, tmp_path, 20)
    case = parity.Case("seed", tmp_path, "seed", 2, in_bfloat16=True)
    found = parity.answers_of(
        case, place, {"copa": [True, False, True, True]}, {"copa.jsonl 0": [True, True, "no prefix", True]}
    )
    assert (found.difference, found.is_missed) == (1, True)
    assert found.note.startswith("3 of 4 questions, 3 right; nanochat stops at 1: no prefix")
    assert parity.Finding("", "", math.nan, 1e-3).is_missed
    assert not parity.Finding("", "", 5.0, None).is_missed


@pytest.mark.soak
@pytest.mark.skipif("NANOCHAT" not in os.environ, reason="set NANOCHAT to a checkout of nanochat")
def test_nanochat_computes_the_same(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "nanochat.py", "--nanochat", os.environ["NANOCHAT"], "--parity"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    options = ["--depths", "2", "--output", tmp_path / "parity.json"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "parity.json").read_text())["parity"]
    assert {finding["name"] for finding in found} >= {"loss of the first step", "bits per byte of the same weights"}
