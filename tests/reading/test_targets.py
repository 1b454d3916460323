"""Variables, targets, entrypoints and includes of one configuration (check 37)."""

import os
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import redacted
from jaxlm.plan.load_config import load_config, load_source, read_config
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import dump
from jaxlm.reading.yaml import load_yaml, parse_value

MANIFEST = """\
vars: {steps: 500, seq_len: 2048, rate: 1.0e-4, shuffles: false, urls: ["a.txt", "b.txt"], nothing: null, size: "${steps}"}
data: {train_urls: "${urls}", shuffle: "${shuffles}", cache_dir: "cache/${steps}-${shuffles}-${rate}"}
model: {seq_len: "${seq_len}"}
optimizer: {type: adam, learning_rate: "${rate}", nesterov: true}
trainer: {num_train_steps: "${size}", max_eval_batches: "${nothing}", log_dir: "$${steps}"}
phases:
  - {name: one, num_train_steps: 7}
  - {name: two}
targets:
  quick:
    vars: {steps: 50, seq_len: 512}
    phases.0.num_train_steps: 3
  lion:
    optimizer: {type: lion}
  paper:
entrypoints: {default: main, main: paper, fast: quick}
"""


def load(folder: Path, text: str, *options: str) -> RunConfig:
    (folder / "run.yaml").write_text(text)
    return load_config(["--config_path", str(folder / "run.yaml"), *options], "jaxlm.train")


def test_a_variable_keeps_its_type(tmp_path: Path):
    config = load(tmp_path, MANIFEST)
    assert (config.model.seq_len, config.trainer.num_train_steps) == (2048, 500)
    assert config.optimizer.learning_rate == 1e-4
    assert config.data.shuffle is False
    assert config.data.train_urls == ["a.txt", "b.txt"]
    assert config.trainer.max_eval_batches is None


def test_a_variable_inside_of_a_text_is_written_out(tmp_path: Path):
    config = load(tmp_path, MANIFEST)
    assert config.data.cache_dir == "cache/500-false-0.0001"
    assert config.trainer.log_dir == "${steps}"


@pytest.mark.parametrize(
    ("value", "text"), [("0", "0"), ("1", "1"), ("1.0", "1.0"), ("0.0", "0.0"), ("true", "true"), ("null", "null")]
)
def test_a_number_inside_of_a_text_is_not_a_boolean(tmp_path: Path, value: str, text: str):
    config = load(tmp_path, f"vars: {{x: {value}}}\ntrainer: {{log_dir: 'logs/${{x}}'}}\n")
    assert config.trainer.log_dir == f"logs/{text}"


def test_a_target_overrides_keys_and_variables(tmp_path: Path):
    quick = load(tmp_path, MANIFEST, "--target", "quick")
    assert (quick.model.seq_len, quick.trainer.num_train_steps) == (512, 50)
    assert [phase.num_train_steps for phase in quick.phases] == [3, None]


def test_the_default_entrypoint_may_be_an_alias(tmp_path: Path):
    assert load(tmp_path, MANIFEST) == load(tmp_path, MANIFEST, "--target", "paper")
    assert load(tmp_path, MANIFEST, "--target=fast") == load(tmp_path, MANIFEST, "--target", "quick")


def test_each_target_has_a_run_of_its_own(tmp_path: Path):
    assert load(tmp_path, MANIFEST).trainer.id == "run-paper"
    assert load(tmp_path, MANIFEST, "--target", "fast").trainer.id == "run-quick"


def test_the_command_line_wins_over_a_target(tmp_path: Path):
    config = load(tmp_path, MANIFEST, "--target", "quick", "--model.seq_len", "64", "--vars.steps", "9")
    assert (config.model.seq_len, config.trainer.num_train_steps) == (64, 9)


def test_a_target_may_change_a_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = load(tmp_path, MANIFEST, "--target", "lion")
    assert (type(config.optimizer).__name__, config.optimizer.learning_rate) == ("LionConfig", 1e-4)
    assert "these keys are ignored: optimizer.nesterov" in capsys.readouterr().out


def test_what_is_recorded_has_no_variables(tmp_path: Path):
    config = load(tmp_path, MANIFEST, "--target", "quick")
    recorded = parse_value(dump(config))
    assert not {"vars", "targets", "entrypoints"} & recorded.keys()
    assert recorded["model"]["seq_len"] == 512
    (tmp_path / "saved.yaml").write_text(dump(config))
    assert read_config(tmp_path / "saved.yaml") == config


def test_without_any_of_the_keys_a_dollar_means_nothing(tmp_path: Path):
    assert load(tmp_path, "trainer: {log_dir: 'logs/${HOME}'}\n").trainer.log_dir == "logs/${HOME}"


def test_a_secret_in_a_variable_is_masked(tmp_path: Path):
    config = load(tmp_path, "vars: {hf_token: sesame-open-please}\ntrainer: {log_dir: 'x-${hf_token}'}\n")
    assert "sesame" not in dump(config)
    assert "sesame" not in redacted(config.trainer.log_dir)


DOUBLED = "vars:\n  v0: x\n" + "".join(f"  v{n + 1}: '${{v{n}}}${{v{n}}}'\n" for n in range(40))
CHAINED = "vars:\n  v0: x\n" + "".join(f"  v{n + 1}: '${{v{n}}}'\n" for n in range(200))
ERRORS = {
    "undefined": ("vars: {stops: 1}\ntrainer:\n  seed: ${steps}\n", [], ["run.yaml:3", "trainer.seed", "'stops'"]),
    "undefined in a list": ("vars: {}\ndata: {train_urls: [a, '${b}']}\n", [], ["run.yaml:2", "train_urls.1", "none"]),
    "cyclic": ("vars: {a: $b, b: '${c}', c: '${b}'}\ntrainer: {id: '${b}'}\n", [], ["trainer.id", "b -> c -> b"]),
    "list in a text": ("vars: {a: [1]}\ntrainer: {id: 'x${a}'}\n", [], ["run.yaml:2", "trainer.id", "a list cannot"]),
    "no variables": ("vars: [1]\n", [], ["run.yaml:1", "vars", "a mapping from names"]),
    "unknown target": (MANIFEST, ["--target", "quik"], ["--target", "'quick'", "fast, lion, main, paper, quick"]),
    "unknown alias": (
        "targets: {a: {}}\nentrypoints: {b: c}\n",
        [],
        ["run.yaml:2", "entrypoints.b", "'c'", "Known: a, b"],
    ),
    "circular alias": ("targets: {a: {}}\nentrypoints: {b: c, c: b}\n", [], ["entrypoints.b", "b -> c -> b"]),
    "shadowed target": ("targets: {a: {}, b: {}}\nentrypoints: {a: b}\n", [], ["entrypoints.a", "is a target already"]),
    "no targets": ("trainer: {seed: 1}\n", ["--target", "x"], ["--target", "has no targets"]),
    "targets as a list": ("targets: [a]\n", [], ["run.yaml:1", "targets", "a mapping from names"]),
    "a target as text": ("targets: {a: b}\n", [], ["run.yaml:1", "targets.a", "a mapping of sections"]),
    "unknown key": (
        "targets:\n  a: {}\n  b:\n    trainer:\n      sed: 1\n",
        ["--target", "b"],
        ["run.yaml:5", "trainer.sed"],
    ),
    "unknown variable": (MANIFEST, ["--vars.stepz", "1"], ["--vars.stepz", "'steps'"]),
    "no vars at all": ("trainer: {seed: 1}\n", ["--vars.a", "1"], ["--vars.a", "has no vars"]),
    "many values": (DOUBLED + "trainer: {id: '${v40}'}\n", [], ["trainer.id", "more than 100000 values"]),
    "deep": (CHAINED + "trainer: {id: '${v200}'}\n", [], ["trainer.id", "more than 100 variables use one another"]),
    "no such index": (
        "targets: {a: {phases.3.name: x}}\nphases: []\n",
        ["--target", "a"],
        ["targets.a.phases.3.name", "'3'"],
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_mistake_names_the_file_and_the_path(case: str, tmp_path: Path):
    text, options, expected = ERRORS[case]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *options)
    assert not [part for part in expected if part not in str(caught.value)], str(caught.value)


def test_include_at_the_top_is_a_base(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("trainer: {seed: 1, log_dir: a}\nvars: {x: 1}\n")
    (tmp_path / "more.yaml").write_text("include: base.yaml\ntrainer: {log_dir: b}\n")
    config = load(tmp_path, "include: [more.yaml]\nvars: {x: 2}\nmodel: {seq_len: '${x}'}\n")
    assert (config.trainer.seed, config.trainer.log_dir, config.model.seq_len) == (1, "b", 2)


def test_an_included_file_may_use_variables(tmp_path: Path):
    (tmp_path / "model.yaml").write_text("seq_len: ${n}\n")
    assert load(tmp_path, "vars: {n: 32}\nmodel: !include model.yaml\n").model.seq_len == 32


@pytest.mark.parametrize("how", ["model: !include {}\n", "<<: !include {}\n", "include: {}\n"])
@pytest.mark.parametrize("name", ["../out.yaml", "link.yaml", "{outside}", "sub/../../out.yaml"])
def test_an_include_stays_in_the_project(how: str, name: str, tmp_path: Path):
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (tmp_path / "out.yaml").write_text("seq_len: 1\n")
    os.symlink(tmp_path / "out.yaml", project / "link.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: .*is outside of the project .*--config_root"):
        load(project, how.format(name.format(outside=tmp_path / "out.yaml")))


def test_the_project_may_be_a_folder_above(tmp_path: Path):
    (tmp_path / "project").mkdir()
    (tmp_path / "out.yaml").write_text("seq_len: 8\n")
    config = load(tmp_path / "project", "model: !include ../out.yaml\n", "--config_root", str(tmp_path))
    assert config.model.seq_len == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("include: nowhere.yaml\n", ["run.yaml:1", "nowhere.yaml", "No such file"]),
        ("trainer: {seed: 1}\ninclude: run.yaml\n", ["run.yaml:2", "circular", "run.yaml -> run.yaml"]),
        ("include: {a: b}\n", ["run.yaml:1", "include: the name of a YAML file"]),
        ("include: [list.yaml]\n", ["run.yaml:1", "list.yaml has a list"]),
    ],
)
def test_an_include_that_cannot_be_read_names_the_file(text: str, expected: list[str], tmp_path: Path):
    (tmp_path / "list.yaml").write_text("[1]\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert not [part for part in expected if part not in str(caught.value)], str(caught.value)


def test_a_section_may_have_a_key_include(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("data: {include: x}\n")
    assert load_yaml(tmp_path / "run.yaml").tree == {"data": {"include": "x"}}


def test_the_undecoded_source_has_no_variables_either(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(MANIFEST)
    source, name = load_source(["--config_path", str(tmp_path / "run.yaml"), "--target", "quick"], "jaxlm", RunConfig)
    assert (source.tree["model"], name) == ({"seq_len": 512}, "run-quick")
