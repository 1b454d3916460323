"""Configuration errors (one message, exit code 2, nothing written), and what valid configurations decode to."""

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import yaml

import jaxlm
from jaxlm import __main__, train
from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.chat import ChatFormat
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.plan.load_config import decode_run, load_config, read_config, read_saved, run_id_of
from jaxlm.reading.decode import dump, encode
from jaxlm.reading.yaml import ConfigSource, load_yaml

GOOD = """
data: {train_urls: ["text.txt"], vocab_size: 300}
model: {type: llama, seq_len: 16, hidden_dim: 32, intermediate_dim: 32, num_layers: 1, num_heads: 4, num_kv_heads: 4}
trainer: {num_train_steps: 4, train_batch_size: 8}
"""

# (text of run.yaml, or a change to the valid one; options; what the message must contain)
MISTAKES = {
    "wrong key": (
        GOOD.replace("seq_len", "seq_length"),
        (),
        ["run.yaml:3", "model.seq_length", "Did you mean 'seq_len'"],
    ),
    "wrong section": (GOOD.replace("trainer:", "trainers:"), (), ["run.yaml:4", "trainers", "Did you mean 'trainer'"]),
    "wrong type": (
        GOOD,
        ("--trainer.num_train_steps", "many"),
        ["num_train_steps", "'many' given", "an integer of 1 or more expected"],
    ),
    "null": (GOOD, ("--trainer.seed", "null"), ["trainer.seed", "null given"]),
    "true is no number": (GOOD, ("--trainer.seed", "true"), ["trainer.seed", "true given"]),
    "duplicate key": (GOOD + "trainer: {seed: 1}\n", (), ["run.yaml:5", "trainer", "line 4"]),
    "missing include": (GOOD + "optimizer: !include no.yaml\n", (), ["run.yaml:5", "no.yaml"]),
    "cyclic include": (GOOD + "optimizer: !include run.yaml\n", (), ["run.yaml:5", "circular"]),
    "syntax": ("trainer: [1\n", (), ["run.yaml:1"]),
    "unknown type": (GOOD.replace("llama", "lama"), (), ["model.type", "'lama' given", "llama, "]),
    "batch that does not divide": (
        GOOD,
        ("--trainer.train_batch_size", "12"),
        ["train_batch_size: 12", "8 devices", "8, 16"],
    ),
    "microbatch that does not divide": (
        GOOD,
        ("--trainer.train_batch_size", "48", "--trainer.per_device_parallelism", "4"),
        ["per_device_parallelism: 4", "Allowed: 1, 2, 3, 6"],
    ),
    "later batch that does not divide": (
        GOOD,
        ("--trainer.train_batch_size", "[{start: 0, value: 16}, {start: 9, value: 20}]"),
        ["train_batch_size: 20 sequences from step 9 do", "8 devices", "16, 24"],
    ),
    "batch sizes out of order": (
        GOOD,
        ("--trainer.train_batch_size", "[{start: 5, value: 16}, {start: 5, value: 32}]"),
        ["train_batch_size: stages starting at steps [5, 5]", "the first must start at 0"],
    ),
    "batch size of nothing": (
        GOOD,
        ("--trainer.train_batch_size", "[{start: 0, value: -1}]"),
        ["train_batch_size.0.value: -1 given"],
    ),
    "heads that do not divide": (GOOD.replace("num_heads: 4", "num_heads: 5"), (), ["model.num_heads", "5", "32"]),
    "key heads that do not divide": (
        GOOD.replace("num_kv_heads: 4", "num_kv_heads: 3"),
        (),
        ["model.num_kv_heads", "3", "4"],
    ),
    "mesh that does not divide": (GOOD, ("--trainer.model_axis_size", "3"), ["model_axis_size", "3", "1, 2, 4, 8"]),
    "unknown axis": (GOOD, ("--trainer.fsdp_axis", "embedd"), ["'embedd'", "embed"]),
    "unknown mesh axis": (GOOD, ("--trainer.axis_resources", "{mlp: modle}"), ["'modle'", "model"]),
    "glob that matches nothing": (
        GOOD,
        ("--data.train_urls", "[nowhere/*.txt]"),
        ["data.train_urls[0]", "nowhere/*.txt"],
    ),
    "remote cache": (
        GOOD,
        ("--data.cache_dir", "nowhere://x"),
        ["data.cache_dir", "fsspec does not support nowhere://"],
    ),
    "no data": (GOOD, ("--data.train_urls", "[]"), ["data.train_urls", "empty"]),
    "bad duration": (GOOD, ("--trainer.checkpointer.save_interval", "soon"), ["save_interval", "'soon'", "15m"]),
    "bad keep": (GOOD, ("--trainer.checkpointer.keep", "[{every: 5}, {every: 10}]"), ["keep.0.until"]),
    "bad pattern": (GOOD + "phases: [{name: a, trainable: ['(']}]\n", (), ["'('", "regular expression"]),
    "pattern that matches nothing": (GOOD + "phases: [{name: a, trainable: [attnn]}]\n", (), ["'attnn'", "attn"]),
    "surgery that matches nothing": (
        GOOD + "phases: [{name: a, surgery: [{type: lora, target: zzz}]}]\n",
        (),
        ["'zzz'"],
    ),
    "phase named as what is no checkpoint": (
        GOOD + "phases: [{name: a.damaged.2}]\n",
        (),
        ["phases.0.name", "reserved for incomplete checkpoints"],
    ),
    "two phases of one name": (GOOD + "phases: [{name: a}, {name: a}]\n", (), ["phases", "a, a"]),
    "bad precision": (GOOD, ("--trainer.mp", "p=f32,c=bf17"), ["trainer.mp", "bf17", "bfloat16"]),
    "float16": (GOOD, ("--trainer.mp", "f16"), ["trainer.mp", "p=f32,c=float16"]),
    "bad warmup": (GOOD, ("--optimizer.warmup", "1.5"), ["optimizer.warmup", "1.5"]),
    "bad schedule": (GOOD, ("--optimizer.lr_schedule", "cosin"), ["lr_schedule", "'cosin'", "cosine"]),
    "missing tokenizer": (GOOD, ("--data.tokenizer", "gone.json"), ["data.tokenizer", "gone.json"]),
    "option without value": (GOOD, ("--dry_run",), ["--dry_run", "needs a value"]),
    "nearly the option for the file": (GOOD, ("--confg_path", "x.yaml"), ["--confg_path", "--config_path"]),
    "word that is no option": (GOOD, ("dry_run",), ["'dry_run'"]),
}


# (text of run.yaml, options, how the whole message begins)
MISTAKES_IN_KEYS = {
    "watchdog": (
        "trainer:\n  seed: 1\n  watchdog:\n    report_after: 5m\n    end_after: 2m\n",
        (),
        "run.yaml:5: trainer.watchdog.end_after: 0:02:00 given, but report_after is 0:05:00",
    ),
    "range of a duration": (
        "trainer:\n  watchdog:\n    end_after: 2h\n    report_after: 0s\n",
        (),
        "run.yaml:4: trainer.watchdog.report_after: 0:00:00 given, 1s to 365d expected",
    ),
    "option": (
        "trainer:\n  watchdog:\n    report_after: 5m\n",
        ("--trainer.watchdog.end_after", "2m"),
        "command line --trainer.watchdog.end_after: 0:02:00 given, but report_after",
    ),
    "absolute path": (
        "model:\n  type: llama\n  gradient_checkpointing: some\n",
        (),
        "run.yaml:3: model.gradient_checkpointing: 'some' given",
    ),
    "section in a phase": (
        "phases:\n- name: a\n  optimizer:\n    type: adam\n    skip_bad_steps:\n      rewind_after: 50\n",
        (),
        "run.yaml:5: phases.0.optimizer.skip_bad_steps.max_in_a_row: 8 is the default, but rewind_after is 50",
    ),
    "two keys of a section": (
        "phases:\n- name: a\n  optimizer:\n    update_rms_clipping: 1.0\n    clip_update_norm: {}\n",
        (),
        "run.yaml:4: phases.0.optimizer.update_rms_clipping: 1.0 given together with clip_update_norm",
    ),
    "none of several keys": (
        "trainer:\n  until:\n    metric: eval/loss\n",
        (),
        "run.yaml:2: trainer.until.below: none of below, above, patience given, at least one expected",
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text " * 400)
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_is_one_message_and_nothing_is_written(name, here, capsys):
    text, options, parts = MISTAKES[name]
    (here / "run.yaml").write_text(text)
    assert train.main(["--config_path", "run.yaml", *options]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for part in parts:
        assert part in message, message
    assert sorted(path.name for path in here.iterdir()) == ["run.yaml", "text.txt"]


@pytest.mark.parametrize("name", MISTAKES_IN_KEYS)
def test_what_a_section_refuses_names_the_line_of_the_key(name, here, capsys):
    text, options, start = MISTAKES_IN_KEYS[name]
    (here / "run.yaml").write_text(text)
    assert train.main(["--config_path", "run.yaml", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {start}")


def test_a_missing_file(here, capsys):
    assert train.main(["--config_path", "gone.yaml"]) == 2
    assert str(here / "gone.yaml") in capsys.readouterr().err


def test_without_a_configuration_the_message_says_how_to_start(here, capsys):
    assert train.main([]) == 2
    assert "--config_path" in capsys.readouterr().err
    assert __main__.main([]) == 0
    assert "jaxlm train --config_path jaxlm:quickstart.yaml" in capsys.readouterr().out


def test_the_id_defaults_to_the_config_files_stem(here):
    (here / "mine.yaml").write_text(GOOD)
    assert read_config(here / "mine.yaml").trainer.id == "mine"
    assert read_config(str(here / "mine.yaml")) == read_config(here / "mine.yaml")
    (here / "mine.yaml").write_text(GOOD.replace("trainer: {", "trainer: {id: other, "))
    assert read_config(here / "mine.yaml").trainer.id == "other"


PHASES = (
    GOOD
    + """
optimizer: {learning_rate: 1.0e-3, weight_decay: 0.1}
evals: [{type: loss}, {type: samples, prompts: [a, b], top_k: 3}]
phases:
  - name: one
  - name: two
    surgery: [{type: lora, rank: 2}]
    trainable: ['\\.[ab]$']
    data: {train_urls: [other.txt], cache_dir: c2}
    optimizer: {learning_rate: 1.0e-4}
"""
)


# Phases whose formats and sources have other types than those of the top level.
CHATS = (
    GOOD
    + """
phases:
  - name: text
  - name: chats
    data: {cache_dir: c2, format: {type: chat, mask_user_turns: false}}
  - name: tasks
    data: {train_urls: [], cache_dir: c3, source: {type: arithmetic, num_train: 5}, format: {type: chat}}
"""
)


def test_a_phase_inherits_missing_keys_from_the_top_level(here):
    (here / "run.yaml").write_text(PHASES)
    one, two = read_config(here / "run.yaml").phases
    assert one.optimizer is None
    assert one.data is None
    assert (two.optimizer.learning_rate, two.optimizer.weight_decay) == (1e-4, 0.1)
    assert (two.data.train_urls, two.data.vocab_size) == (["other.txt"], 300)


def test_a_phase_that_names_the_default_type_inherits_the_keys_inside(here):
    text = GOOD.replace("vocab_size: 300", "vocab_size: 300, format: {text_key: body}")
    text += "phases: [{name: a, data: {format: {type: text}}}]\n"
    (here / "run.yaml").write_text(text)
    (phase,) = read_config(here / "run.yaml").phases
    assert phase.data.format.text_key == "body"


def test_a_phase_with_another_kind_of_data_inherits_the_tokenizer_alone(here):
    text = GOOD.replace("vocab_size: 300", "vocab_size: 300, tokenizer: {type: bpe, pattern: nanochat}")
    pairs = "{type: pairs, source: {type: arithmetic_pairs}, cache_dir: c2}"
    (here / "run.yaml").write_text(text + f"phases: [{{name: a}}, {{name: b, data: {pairs}}}]\n")
    config = read_config(here / "run.yaml")
    data = config.phases[1].data
    assert (data.tokenizer, data.vocab_size) == (config.data.tokenizer, 300)
    assert config.data.tokenizer.pattern == "nanochat"
    assert (data.train_urls, data.cache_dir) == ([], "c2")


@pytest.mark.parametrize("text", [GOOD, PHASES, CHATS], ids=["plain", "phases", "other types in phases"])
def test_a_dumped_configuration_loads_back_equal(text, here):
    (here / "run.yaml").write_text(text)
    config = read_config(here / "run.yaml")
    (here / "saved.yaml").write_text(dump(config))
    assert read_config(here / "saved.yaml") == config
    changed = replace(config, trainer=replace(config.trainer, seed=5))
    assert decode_run(ConfigSource({"trainer": {"seed": 5}}), None).trainer.seed == changed.trainer.seed


def test_a_new_type_on_the_command_line_drops_the_old_types_keys(here, capsys):
    (here / "run.yaml").write_text(GOOD)
    config = load_config(["--config_path", "run.yaml", "--model.type", "gpt2"], "jaxlm train")
    assert "these keys of the file are ignored: model.num_kv_heads\n" in capsys.readouterr().out
    assert config.model == Gpt2Config(seq_len=16, hidden_dim=32, intermediate_dim=32, num_layers=1, num_heads=4)


def test_a_new_type_inside_of_a_section_with_a_type_drops_the_old_types_keys(here, capsys):
    text = GOOD.replace("vocab_size: 300", "vocab_size: 300, format: {type: supervised, pack: false, input_field: a}")
    (here / "run.yaml").write_text(text)
    config = load_config(["--config_path", "run.yaml", "--data.format.type", "chat"], "jaxlm train")
    assert "these keys of the file are ignored: data.format.input_field\n" in capsys.readouterr().out
    assert config.data.format == ChatFormat(pack=False)
    (here / "run.yaml").write_text(text.replace("supervised", "chat"))
    with pytest.raises(ConfigError, match=r"run\.yaml:2: data\.format\.input_field: no such key in .* \(type chat\)"):
        decode_run(load_yaml("run.yaml"), None)


def test_a_new_type_replaces_the_keys_that_a_saved_configuration_has_for_the_old_one(here):
    (here / "saved.yaml").write_text(dump(decode_run(ConfigSource(yaml.safe_load(GOOD)), None)))
    keys = {"data.format": {"type": "chat"}, "model.rope.type": "llama3", "model.rope.factor": 2.0}
    config = read_saved(here / "saved.yaml", keys)
    assert config.data.format == ChatFormat()
    assert encode(config.model)["rope"]["factor"] == 2.0
    with pytest.raises(ConfigError, match=r"data\.format\.pack: no such key in data\.format \(type text\)"):
        read_saved(here / "saved.yaml", {"data.format": {"type": "text", "pack": True}})


def test_included_files_and_overrides_merge_deeply(here):
    (here / "base.yaml").write_text(GOOD)
    (here / "run.yaml").write_text("<<: !include base.yaml\ntrainer: {seed: 3}\n")
    config = decode_run(load_yaml("run.yaml"), "run")
    assert (config.trainer.seed, config.trainer.num_train_steps) == (3, 4)


@pytest.mark.trap("T4")
def test_where_the_run_id_comes_from(monkeypatch):
    """Levanter chooses a random id unless `trainer.id` is set, so it never resumes."""
    monkeypatch.delenv("RUN_ID", raising=False)
    tracked = {"trainer": {"tracker": {"type": "wandb", "id": "tracked"}}}
    assert run_id_of(decode_run(ConfigSource({}), None)) == "run"
    assert run_id_of(decode_run(ConfigSource({}), "stem")) == "stem"
    assert run_id_of(decode_run(ConfigSource(tracked), "stem")) == "tracked"
    monkeypatch.setenv("RUN_ID", "environment")
    assert run_id_of(decode_run(ConfigSource(tracked), "stem")) == "environment"
    assert run_id_of(decode_run(ConfigSource({"trainer": {"id": "written"}}), "stem")) == "written"


def test_a_configuration_at_a_url_includes_the_files_beside_it():
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/configs/mine.yaml", b"<<: !include base.yaml\ntrainer: {seed: 3}\n")
    memory.pipe_file("/configs/base.yaml", GOOD.encode())
    config = read_config("memory://configs/mine.yaml")
    assert (config.trainer.id, config.trainer.seed, config.trainer.num_train_steps) == ("mine", 3, 4)
    with pytest.raises(ConfigError, match=r"--config_path: 'memory://configs/gone\.yaml' cannot be read"):
        read_config("memory://configs/gone.yaml")


def test_keys_override_a_file_as_the_command_line_does(here):
    (here / "mine.yaml").write_text("vars: {steps: 30}\ntrainer: {num_train_steps: '${steps}', seed: 3}\n")
    keys = {"trainer.seed": 5, "optimizer": {"type": "lion"}, "vars.steps": 20, "evals": []}
    options = ("--trainer.seed", "5", "--optimizer", "{type: lion}", "--vars.steps", "20", "--evals", "[]")
    config = jaxlm.read_config(here / "mine.yaml", keys)
    assert config == load_config(("--config_path", str(here / "mine.yaml"), *options), "jaxlm.train")
    assert (config.trainer.num_train_steps, config.trainer.seed, config.trainer.id) == (20, 5, "mine")
    for problem, wrong in {
        r"^keys: trainer.sed: no such key in trainer. Did you mean 'seed'": {"trainer.sed": 1},
        r"^keys: trainer.seed: 'x' given": {"trainer.seed": "x"},
    }.items():
        with pytest.raises(ConfigError, match=problem):
            jaxlm.read_config(here / "mine.yaml", wrong)
