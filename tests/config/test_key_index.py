"""The index of keys gives the same errors as decoding the whole configuration, and refuses nothing else."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxlm.config.key_index import KeyIndex, check_command_line
from jaxlm.config.load import load_config
from jaxlm.config.recipes import FOLDER, all_recipes, recipe, recipes_command
from jaxlm.config.yaml import ConfigSource, load_yaml
from jaxlm.core.errors import ConfigError
from tests.interop.test_levanter import REFUSED, SAME


@pytest.mark.parametrize(
    "arguments",
    [
        ("--optimizer.lerning_rate", "1"),
        ("--optimiser.learning_rate", "1"),
        ("--trainer.checkpointer.keeep", "[]"),
        ("--model.attention_bias", "true", "--model.hiden_dim", "4"),
        ("--evals", "[{type: harness, taskz: [a]}]"),
        ("--config_path", "typo.yaml"),
        ("--config_path", "missing.yaml"),
        ("--config_path", "jaxlm:quickstart.yml"),
        ("--config_path", "twice.yaml"),
        ("--seed",),
        ("--trainer.seed", "1", "--trainer.seed", "2"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_an_error_reads_the_same_with_and_without_jax(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("trainer:\n  checkpointer: {base_pth: x}\n")
    Path("twice.yaml").write_text("trainer: {seed: 1}\ntrainer: {seed: 2}\n")
    with pytest.raises(ConfigError) as whole:
        load_config(arguments, "jaxlm.train")
    with pytest.raises(ConfigError) as quick:
        check_command_line(arguments)
    assert str(quick.value) == str(whole.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--optimizer.type", "muon", "--optimizer.momentum", "0.9"),
        ("--optimizer.type", "my.package:Optimizer", "--optimizer.anything", "1"),
        ("--data.source", "{type: 'my.package:Sums', num_records: 5}"),
        ("--trainer.per_device_train_batch_size", "4"),
        ("--trainer.tracker", "[{type: tensorboard, logdir: x}]"),
        ("--config_path", "model.yaml"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_keys_that_need_jax_to_check_are_not_checked_without_it(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text("use_hf_model_config: true\ninitialize_from_hf: folder\nmodel: {use_qk_norm: true}\n")
    check_command_line(arguments)


@pytest.mark.parametrize("tree", [case[0] for case in (*SAME.values(), *REFUSED.values())], ids=[*SAME, *REFUSED])
def test_levanter_spellings_are_left_to_the_translation(tree):
    KeyIndex.load().check(ConfigSource(tree))


NAMES = [path.relative_to(FOLDER).as_posix() for path in all_recipes()]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_have_no_unknown_key(name):
    KeyIndex.load().check(load_yaml(f"jaxlm:{name}"))
    assert recipe(name.removesuffix(".yaml")) == recipe(name) == FOLDER / name
    config = load_config(["--config_path", f"jaxlm:{name}", "--use_hf_model_config", "false"], "jaxlm.train")
    assert config.trainer.id == Path(name).stem


def test_recipes_are_listed_and_copied_but_never_overwrite_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert recipes_command([]) == 0
    listed = capsys.readouterr().out.partition("\n\n")[0]
    assert {"jaxlm:quickstart.yaml", "jaxlm:nanochat/cpu_d4.yaml"} <= set(listed.split())
    assert all(re.fullmatch(r"\s+jaxlm:\S+\s+\S.*[.:]", line) for line in listed.splitlines()), "whole sentences"
    assert recipes_command(["two_phases"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"two_phases.yaml", "quickstart.yaml"}, "what it includes, too"
    assert load_yaml("two_phases.yaml").tree == load_yaml("jaxlm:two_phases.yaml").tree
    assert recipes_command(["nanochat/cpu_d4"]) == 0
    assert load_yaml("cpu_d4.yaml").tree == load_yaml("jaxlm:nanochat/cpu_d4").tree
    assert recipes_command(["quickstart"]) == 0  # an unchanged copy exists already
    Path("quickstart.yaml").write_text("mine: 1\n")
    with pytest.raises(ConfigError, match=r"quickstart\.yaml already exists in this folder\. Rename or delete it"):
        recipes_command(["quickstart.yaml"])
    with pytest.raises(ConfigError, match=r"jaxlm:quikstart: no such recipe\. Did you mean jaxlm:quickstart\.yaml\?"):
        recipes_command(["quikstart"])


def test_help_errors_and_recipes_do_not_import_jax(tmp_path):
    """Runs in one process that fails if jax is imported."""
    program = textwrap.dedent("""
        import sys
        sys.modules["jax"] = sys.modules["haliax"] = None
        from jaxlm.__main__ import main
        codes = [main(arguments) for arguments in (
            [], ["--version"], ["trian"], ["recipes"], ["train", "--help"], ["train", "--help", "optimizer"],
            ["train", "--help", "nothing"], ["train", "--optimizer.lerning_rate", "1"], ["train", "--config_path", "no.yaml"],
        )]
        print(codes)
    """)
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[0, 0, 2, 0, 0, 0, 2, 2, 2]", result.stderr
    assert "error: 'trian' is not a command. Did you mean 'train'?" in result.stderr
    assert "--optimizer.learning_rate  (float" in result.stdout
    assert "error: --help: there is no section or key 'nothing'" in result.stderr
    assert "Did you mean 'learning_rate'?" in result.stderr
