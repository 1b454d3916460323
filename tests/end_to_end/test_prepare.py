"""jaxlm.commands.prepare: training uses the caches that it builds, and it shows the batches that training uses."""

import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxlm.commands.prepare import batch_as_text, main, prepare
from jaxlm.core.axes import BATCH, DATA, MESH_AXES, REPLICA
from jaxlm.core.sharding import Layout
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize, BatchStage
from jaxlm.observe.console import Console
from jaxlm.plan.load_config import read_config
from tests.answers import write_tokenizer
from tests.data.helpers import some_text, token_batches, write_corpus

TWO_PHASES = """
data: {{train_urls: [{text}], validation_urls: [{text}/b0.txt], cache_dir: {cache}, vocab_size: 300}}
model: {{type: llama, seq_len: 48, hidden_dim: 32, intermediate_dim: 32, num_layers: 1, num_heads: 4, num_kv_heads: 4}}
trainer: {{train_batch_size: 4, num_train_steps: 5, seed: 3}}
phases:
  - {{name: first}}
  - {{name: second, data: {{train_urls: ["{text}/*.txt"], cache_dir: {cache}2, shuffle: false}}}}
"""


@pytest.fixture
def config_path(tmp_path):
    write_corpus(tmp_path / "text")
    text = TWO_PHASES.format(text=tmp_path / "text", cache=tmp_path / "cache")
    # A run has one tokenizer: both phases name the same one, trained beforehand.
    path = tmp_path / "run.yaml"
    path.write_text(text.split("phases:")[0])
    assert main(["--config_path", str(path)]) == 0
    saved = (tmp_path / "cache" / "tokenizer").rename(tmp_path / "saved")
    path.write_text(text.replace("vocab_size: 300", f"tokenizer: {saved}"))
    return path


def shown(config, prepared, tokenizer, number):
    return "\n".join(batch_as_text(config, prepared, tokenizer, number))


def test_shows_the_rows_that_a_step_sees(config_path):
    config = read_config(config_path)
    tokenizer, prepared = prepare(config, Console())
    layout = Layout(
        Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 3),
        {},
        {BATCH: (REPLICA, DATA)},
    )
    assert [data.phase.name for data in prepared] == ["first", "second"]
    for data in prepared:
        mixture = data.data.mixture(BatchSchedule.of([BatchSize(0, 4)]), seed=config.trainer.seed)
        batches = token_batches(mixture, BatchSchedule((BatchStage(0, 4, 2, 2),)), layout)
        for number in range(data.phase.start, data.phase.end):
            batch = next(batches)
            tokens, targets = (np.asarray(c.array).reshape(4, -1) for c in (batch.tokens, batch.targets))
            mask = np.asarray(batch.loss_mask.array).reshape(4, -1)
            text = shown(config, prepared, tokenizer, number)
            assert text.startswith(f"batch {number}: step {number + 1}, phase '{data.phase.name}', 4 rows of 48 tokens")
            rows = re.split(r"=== row \d+: sequence \d+ of \d+, loss on (\d+) of 48 tokens ===\n", text)[1:]
            assert [int(count) for count in rows[::2]] == mask.sum(axis=1).tolist()
            for row, body in enumerate(rows[1::2]):
                plain = re.sub(r"--- document \d+ of [\w.]+ ---\n", "", body).replace("\n", "")
                asked = re.sub("⟦.*?⟧", "", plain)
                expected = tokenizer.decode(targets[row][mask[row] > 0].tolist(), special=True).replace("\n", "")
                # A character that is split between two documents or sequences cannot be shown.
                assert re.sub("�+", "", asked) == re.sub("�+", "", expected)
                assert plain.startswith("⟦" + tokenizer.decode([int(tokens[row][0])], special=True).replace("\n", ""))
        batches.close()


def test_names_the_documents_of_a_row(config_path):
    config = read_config(config_path)
    tokenizer, prepared = prepare(config, Console())
    text = shown(config, prepared, tokenizer, 5)  # the first batch of the second phase, which is not shuffled
    assert "=== row 0: sequence 0 of " in text
    assert "--- document 1 of b0.txt ---\n⟦<|endoftext|>⟧" + some_text(0)[:20] in text


def test_reports_the_contents_of_the_caches(config_path, capsys):
    assert main(["--config_path", str(config_path)]) == 0
    text = capsys.readouterr().out
    _, prepared = prepare(read_config(config_path), Console())
    for data in prepared:
        windows = data.data.train[""]
        cache = windows.cache
        rows = text.split(f"phase '{data.phase.name}': train\n")[1].split("phase '")[0]
        assert f"folder           {cache.folder}" in rows
        assert f"fingerprint      {cache.fingerprint}" in rows
        assert f"bytes            {cache.num_bytes:,} of text" in rows
        assert f"files            {len(cache.documents_of)}\n" in rows
        read = windows.read(np.arange(len(windows)))
        # The very last token is in its sequence but is never an input.
        empty = (read["segment_ids"] == 0).mean() + 1 / read["tokens"].size
        padding = float(re.search(r"padding +([\d.]+)%", rows)[1]) / 100
        assert padding == pytest.approx(empty, abs=1e-6)
    assert "phase 'first': validation\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show_batch", "10"], "--show_batch: 10 given, must be between 0 and 9 (10 steps)"),
        (["--show_batch", "-1"], "--show_batch: -1 given"),
        (["--show_batch", "0", "--trainer.train_batch_size", "-1"], "--show_batch: trainer.train_batch_size is -1"),
        (["--data.train_urls", "[nowhere.txt]"], "data.train_urls[0]: 'nowhere.txt' matches no file"),
        (["--dry_run", "true"], "dry_run: true has no effect here: jaxlm prepare makes caches"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_built(config_path, tmp_path, capsys, arguments, message):
    text = config_path.read_text().split("phases:")[0] + "phases: [{name: a}, {name: b}]\n"
    config_path.write_text(text)
    fresh = ("--data.cache_dir", str(tmp_path / "fresh"))
    assert main(["--config_path", str(config_path), *fresh, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "fresh").exists()


def test_each_line_is_printed_once_where_the_steps_are_counted_from_the_data(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one and", "response": " two"}\n' * 300)
    (tmp_path / "run.yaml").write_text(
        f"""
        data:
          train_urls: [{tmp_path}/a.jsonl]
          validation_urls: [{tmp_path}/a.jsonl]
          cache_dir: {tmp_path}/cache
          vocab_size: 260
          format: {{type: supervised, input_field: prompt, output_field: response}}
        model: {{seq_len: 16}}
        trainer: {{train_batch_size: 4}}
        epoch: 1
        """
    )
    assert main(["--config_path", str(tmp_path / "run.yaml")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]
    assert len(lines) == len(set(lines))
    assert sum("sequences of 16 tokens" in line for line in lines) == 2, "for training and for validation"


@pytest.mark.slow
def test_training_uses_the_prepared_caches(workplace, tmp_path):
    place = workplace()
    place.write()
    arguments = ("--config_path", "run.yaml", "--data.cache_dir", f"{tmp_path}/cache")
    # A platform that does not exist, and a log line for every compilation.
    first = place.finish(*arguments, module="jaxlm.commands.prepare", JAX_PLATFORMS="cuda", JAX_LOG_COMPILES="1")
    assert "Compiling" not in first.err
    assert "train: 4 documents, " in first.out
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    second = place.finish(*arguments, "--trainer.num_train_steps", "2")
    assert "documents, " not in second.out
    assert "training a BPE" not in second.out
    assert {file: file.stat().st_mtime_ns for file in made} == made


def test_shows_an_example_with_its_mask(tmp_path, capsys):
    write_tokenizer(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "a.txt").write_text("text")
    options = ["--data.tokenizer", f"{tmp_path}/tokenizer", "--model.seq_len", "32"]
    options += ["--trainer.train_batch_size", "1", "--trainer.num_train_steps", "1", "--model.num_layers", "1"]
    chats = [*options, "--data.train_urls", f"[{tmp_path}/a.jsonl]", "--data.format.type", "chat"]
    chats += ["--data.cache_dir", f"{tmp_path}/cache"]
    assert main([*chats, "--show_example"]) == 0
    shown = capsys.readouterr().out
    assert "⟦<|user|>What?<|end|><|assistant|>⟧That.<|end|>" in shown
    assert "\x1b" not in shown, "not a terminal"
    assert re.search(r"\n  loss on +\d+\.\d% of all tokens\n", shown)
    texts = [*options, "--data.train_urls", f"[{tmp_path}/a.txt]", "--data.cache_dir", f"{tmp_path}/other"]
    assert main([*texts, "--show_example"]) == 2
    assert "--show_example: no source has chats or prompts with completions" in capsys.readouterr().err
