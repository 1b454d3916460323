"""A checkpoint's validation loss, by source and in total, against the values that training logged."""

import hashlib
import json
import math
import re

import jax
import numpy as np
import pytest

from jaxlm.commands.evaluate import main
from jaxlm.commands.sample import main as sample
from jaxlm.core import tree
from jaxlm.train import main as train
from tests.end_to_end.commands import Finished, Workplace


def evaluate(place: Workplace, *arguments: str) -> Finished:
    return place.run("--checkpoint", "checkpoints/run", *arguments, module="jaxlm.commands.evaluate")


def numbers(result: Finished) -> dict:
    assert result.code == 0, result.err
    return json.loads(result.out.splitlines()[-1])


@pytest.fixture(scope="module")
def usual(finished) -> dict:
    """What an evaluation of the finished run without options prints."""
    return numbers(evaluate(finished))


@pytest.mark.slow
def test_the_total_is_what_training_logged_and_the_mean_of_the_sources(finished):
    result = evaluate(finished)
    found = numbers(result)
    logged = next(r for r in reversed(finished.records()) if "eval/loss" in r)
    assert found["step"] == logged["step"] == 24
    np.testing.assert_allclose(found["loss"], logged["eval/loss"], rtol=1e-6)
    np.testing.assert_allclose(found["bpb"], logged["eval/bpb"], rtol=1e-6)
    sources = list(found["sources"].values())
    assert [url.rpartition("/")[2] for url in found["sources"]] == ["bisect.py", "heapq.py"]
    mean = sum(s["loss"] * s["tokens"] for s in sources) / sum(s["tokens"] for s in sources)
    np.testing.assert_allclose(mean, found["loss"], rtol=1e-12)
    bits = sum(s["bpb"] * s["bytes"] for s in sources) / sum(s["bytes"] for s in sources)
    np.testing.assert_allclose(bits, found["bpb"], rtol=1e-12)
    # Every byte counts, except those of each document's first token, which has no context.
    for url, source in found["sources"].items():
        size = len((finished.corpus / "validation" / url.rpartition("/")[2]).read_bytes())
        assert 0 <= size - source["bytes"] < 20
    assert "tokenizing" not in result.out + result.err
    table = [line.split() for line in result.out.splitlines()]
    assert [row[0].rpartition("/")[2] for row in table[:4]] == ["source", "bisect.py", "heapq.py", "total"]
    assert float(table[3][3]) == pytest.approx(found["loss"], abs=1e-4)


@pytest.mark.soak
def test_sequences_that_are_held_out_of_training_are_evaluated(workplace):
    place = workplace()
    text = place.write().read_text()
    without = "\n".join(line for line in text.splitlines() if "validation_urls" not in line)
    (place.folder / "run.yaml").write_text(without)
    options = ("--data.num_validation_sequences", "20", "--trainer.num_train_steps", "4")
    place.finish("--config_path", "run.yaml", *options, "--evals", "[{type: loss}, {type: entropy}]")
    records = place.records()
    logged = {name: value for record in records for name, value in record.items()}
    assert 0 < logged["eval/entropy"] < math.log(300)
    found = numbers(evaluate(place, "--max_batches", "2"))  # as in training
    np.testing.assert_allclose(found["loss"], logged["eval/loss"], rtol=1e-6)
    assert list(found["sources"]) == ["held out"]


@pytest.mark.slow
def test_the_loss_does_not_depend_on_the_batch_size_and_skipped_batches_are_reported(finished, usual):
    other = numbers(evaluate(finished, "--batch_size", "5"))
    assert [s["tokens"] for s in other["sources"].values()] == [s["tokens"] for s in usual["sources"].values()]
    np.testing.assert_allclose(other["loss"], usual["loss"], rtol=1e-5)
    few = numbers(evaluate(finished, "--max_batches", "1"))
    first, last = few["sources"].values()
    assert first["tokens"] <= 16 * 32
    assert last == {"loss": None, "bpb": None, "tokens": 0.0, "bytes": 0.0}


@pytest.mark.soak
def test_other_text_gets_its_own_cache(finished):
    before = sorted(p.name for p in (finished.cache / "validation").iterdir())
    other = str(finished.corpus / "train" / "textwrap.py")
    found = numbers(evaluate(finished, "--data.validation_urls", f"[{other}]"))
    assert list(found["sources"]) == [other]
    assert math.isfinite(found["loss"])
    assert sorted(p.name for p in (finished.cache / "validation").iterdir()) == before
    (own,) = (finished.cache / "evaluate").iterdir()
    assert (own / "validation" / "cache.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data.validation_urls", "[]"), "the run has no validation data"),
        (("--data.validation_urls", "[nowhere.txt]"), "nowhere.txt"),
        (("--data.validation_url", "[x]"), "Did you mean 'validation_urls'"),
        (("--batch_size", "0"), "--batch_size: 0 given"),
        (("--max_batches", "few"), "--max_batches: 'few' given"),
        (("--config_path", "run.yaml"), "a checkpoint has its own configuration"),
        (("--data.tokenizer", "x.json"), "--data.tokenizer has no effect here: the checkpoint's own tokenizer is used"),
        (("--data.vocab_size", "300"), "--data.vocab_size has no effect here"),
        (("--data.shuffle", "false"), "--data.shuffle has no effect here"),
        (("--data.train_urls", "[x]"), "use --data.validation_urls for the text"),
        (("--batchsize", "4"), "--batchsize is not an option of jaxlm evaluate. Did you mean --batch_size?"),
        (("--dry_run", "true"), "--dry_run is not an option of jaxlm evaluate"),
        (("--optimizer", "{learning_rate: 1}"), "--optimizer is not an option of"),
        (("--optimizer.learning_rate", "1"), "--optimizer.learning_rate has no effect on a trained model"),
        (("--trainer.num_train_steps", "1"), "--trainer.num_train_steps has no effect on a trained model"),
        (("--trainer.model_axis", "2"), "Did you mean 'model_axis_size'"),
    ],
)
def test_errors_are_one_message(finished, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(finished.folder)
    assert main(["--checkpoint", "checkpoints/run", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--promt", "x"), "--promt is not an option of jaxlm sample. Did you mean --prompt?"),
        (("--data.shuffle", "false"), "--data.shuffle has no effect on a trained model"),
        (("--trainer.max_eval_batches", "3"), "--trainer.max_eval_batches has no effect on a trained model"),
        (("--trainer.model_axis_size", "3"), "trainer.model_axis_size"),
        (("--trainer.mp", "f31"), "trainer.mp"),
        (("x",), "'x' is not an option"),
    ],
)
def test_sample_accepts_keys_like_evaluate(finished, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(finished.folder)
    assert sample(["--checkpoint", "checkpoints/run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sample_applies_its_keys(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished.folder)
    seen = []

    def generate(writer, *_, **__):
        seen.append({leaf.dtype.name for leaf in jax.tree.leaves(writer.model)})
        return [[]]

    monkeypatch.setattr("jaxlm.commands.sample.generate_tokens", generate)
    for keys in ((), ("--trainer.mp", "p=f32,c=bfloat16")):
        assert sample(["--checkpoint", "checkpoints/run", *keys]) == 0
    assert seen == [{"float32"}, {"bfloat16"}]


def test_sample_quantizes_on_request(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished.folder)
    seen = []

    def generate(writer, *_, **__):
        seen.append({path: leaf.dtype.name for path, leaf in tree.leaves(writer.model)})
        return [[]]

    monkeypatch.setattr("jaxlm.commands.sample.generate_tokens", generate)
    assert sample(["--checkpoint", "checkpoints/run", "--quantize", "int8", "--trainer.mp", "p=f32,c=bfloat16"]) == 0
    assert re.search(r"int8 weights: 0\.\d MB instead of 0\.\d MB", capsys.readouterr().err)
    assert {dtype for path, dtype in seen[0].items() if path.endswith("_proj.weight.values")} == {"int8"}
    assert {dtype for path, dtype in seen[0].items() if "norm" in path or "tokens" in path} == {"bfloat16"}


def test_training_refuses_quantized_weights(finished, in_process):
    refused = in_process(train, finished, "--config_path", "run.yaml", "--quantize", "int8")
    assert refused.code == 2
    assert "--quantize: quantized weights cannot be trained" in refused.err
    assert "jaxlm sample, chat or evaluate" in refused.err


@pytest.mark.soak
def test_int8_weights_cost_little_of_the_loss(finished, usual):
    found = numbers(evaluate(finished, "--quantize", "int8"))
    assert found["loss"] != usual["loss"]
    np.testing.assert_allclose(found["loss"], usual["loss"], rtol=2e-3)
    assert found["quantize"] == "int8"
    assert "quantize" not in usual


@pytest.mark.slow
def test_samples_use_the_average_on_request(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished.folder)
    seen = []

    def generate(writer, *_, **__):
        seen.append({path: np.asarray(leaf.array) for path, leaf in tree.leaves(writer.model)})
        return [[]]

    monkeypatch.setattr("jaxlm.commands.sample.generate_tokens", generate)
    for weights in ((), ("--weights", "trained"), ("--weights", "ema")):
        assert sample(["--checkpoint", "checkpoints/run", *weights]) == 0
    trained, named, averaged = seen
    saved = finished.digest("step-24")
    for path, array in averaged.items():
        assert hashlib.sha256(array.tobytes()).hexdigest() == saved[f"slots.ema.weights.{path}"]
        np.testing.assert_array_equal(named[path], trained[path])
    assert any((averaged[path] != trained[path]).any() for path in trained)
    assert sample(["--checkpoint", "checkpoints/run", "--weights", "best"]) == 2
    assert "--weights: 'best' given" in capsys.readouterr().err


@pytest.mark.soak
def test_the_average_gives_the_loss_that_training_logged(finished):
    logged = next(r for r in reversed(finished.records()) if "eval/ema/loss" in r)
    assert logged["eval/ema/loss"] != logged["eval/loss"]
    found = numbers(evaluate(finished, "--weights", "ema"))
    np.testing.assert_allclose(found["loss"], logged["eval/ema/loss"], rtol=1e-6)
    finished.finish(
        *(
            "to-hf",
            "--checkpoint",
            "checkpoints/run",
            "--output_dir",
            "averaged",
            "--weights",
            "ema",
            "--verify",
            "true",
        ),
        module="jaxlm.commands.convert",
    )
