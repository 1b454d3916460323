"""The command `jaxlm`: errors, help and recipes, none of which starts a device."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import load_config
from jaxlm.reading import recipes
from jaxlm.reading.recipes import all_recipes, recipe, recipes_command
from jaxlm.reading.yaml import load_yaml


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--optimizer.lerning_rate", "1"),
            (
                "command line --optimizer.lerning_rate: no such key in optimizer (type adam). Did you mean 'learning_rate'?"
                " Allowed: learning_rate, weight_decay, lr_schedule, "
            ),
        ),
        (
            ("--optimiser.learning_rate", "1"),
            (
                "command line --optimiser.learning_rate: optimiser: no such key in the top level. Did you mean 'optimizer'?"
                " Allowed: data, model, "
            ),
        ),
        (
            ("--model.attention_bias", "true", "--model.hiden_dim", "4"),
            "command line --model.hiden_dim: no such key in model (type llama). Did you mean 'hidden_dim'? Allowed: ",
        ),
        (
            ("--model.typ", "gpt2", "--model.num_layers", "4"),
            "command line --model.typ: no such key in model (type llama). Did you mean 'type'? Allowed: ",
        ),
        (
            ("--model.rope.factor", "3"),
            "command line --model.rope.factor: no such key in model.rope (type default). Types that have it: linear,",
        ),
        (
            ("--model.rope.factor", "true"),
            "command line --model.rope.factor: no such key in model.rope (type default). Types that have it: linear,",
        ),
        (
            ("--evals", "[{type: harness, taskz: [a]}]"),
            "command line --evals: evals.0.taskz: no such key in evals.0 (type harness). Did you mean 'tasks'? Allowed: ",
        ),
        (
            ("--config_path", "typo.yaml"),
            (
                "typo.yaml:2: trainer.checkpointer.base_pth: no such key in trainer.checkpointer. Did you mean 'base_path'?"
                " Allowed: base_path, "
            ),
        ),
    ],
    ids=lambda arguments: " ".join(arguments) if isinstance(arguments, tuple) else "",
)
def test_an_unknown_key_is_named_with_its_place_and_what_is_meant(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("trainer:\n  checkpointer: {base_pth: x}\n")
    with pytest.raises(ConfigError) as error:
        load_config(arguments, "jaxlm.train")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("name", all_recipes())
def test_recipes_are_valid_and_named_after_their_files(name):
    assert recipe(name.removesuffix(".yaml")) == recipe(name) == all_recipes()[name]
    config = load_config(["--config_path", f"jaxlm:{name}", "--use_hf_model_config", "false"], "jaxlm.train")
    default = load_yaml(recipe(name)).tree.get("entrypoints", {}).get("default")
    assert config.trainer.id == (Path(name).stem if default is None else f"{Path(name).stem}-{default}")


def test_recipes_include_each_other_where_the_package_is_a_link(tmp_path):
    """As in a virtual environment of links, or with a home folder on another disk."""
    (tmp_path / "linked").symlink_to(Path(recipes.__file__).parents[2])
    (tmp_path / "run.yaml").write_text("<<: !include jaxlm:two_phases.yaml\n")
    code = "import jaxlm; from jaxlm.reading.yaml import load_yaml; tree = load_yaml('run.yaml').tree\n"
    code += "print(jaxlm.__file__, tree['trainer']['num_train_steps'], 'model' in tree)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "linked")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [str(tmp_path / "linked/jaxlm/__init__.py"), "400", "True"], done.stderr


def test_recipes_are_listed_and_copied_but_never_overwrite_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert recipes_command([]) == 0
    listed = re.sub(r"\n {8,}", " ", capsys.readouterr().out.partition("\n\n")[0])
    assert {"jaxlm:quickstart.yaml", "jaxlm:long/extend.yaml"} <= set(listed.split())
    assert all(re.fullmatch(r"\s+jaxlm:\S+\s+\S.*\.", line) for line in listed.splitlines()), "whole sentences"
    assert recipes_command(["two_phases"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"two_phases.yaml", "quickstart.yaml"}, "what it includes, too"
    assert load_yaml("two_phases.yaml").tree == load_yaml("jaxlm:two_phases.yaml").tree
    assert recipes_command(["long/extend"]) == 0
    assert load_yaml("extend.yaml").tree == load_yaml("jaxlm:long/extend").tree
    assert recipes_command(["quickstart"]) == 0  # an unchanged copy exists already
    Path("quickstart.yaml").write_text("mine: 1\n")
    with pytest.raises(ConfigError, match=r"quickstart\.yaml already exists in this folder\. Rename or delete it"):
        recipes_command(["quickstart.yaml"])
    with pytest.raises(ConfigError, match=r"jaxlm:quikstart: no such recipe\. Did you mean jaxlm:quickstart\.yaml\?"):
        recipes_command(["quikstart"])


# Every command that needs no model answers without jax, which takes seconds to import.
ANSWERED = """
    import sys
    from jaxlm.__main__ import main
    codes = [main(arguments) for arguments in (
        [], ["--version"], ["trian"], ["recipes"], ["train", "--x"], ["train", "--optimizer.lerning_rate", "1"],
        ["train", "--config_path", "no.yaml"], ["train", "--trainer.nmu_train_steps", "1"],
        ["train", "--model_name_or_path", "1"], ["train", "--train_batch_size", "1"], ["train", "--max_iters", "1"],
        ["report", "logged"],
    )]
    print(codes, sorted({"jax", "torch", "matplotlib", "haliax"} & sys.modules.keys()))
"""


def test_errors_recipes_and_reports_need_no_jax(tmp_path):
    (tmp_path / "logged").mkdir()
    (tmp_path / "logged/metrics.jsonl").write_text('{"step": 1, "train/loss": 5.0}\n')
    result = in_a_new_process(ANSWERED, tmp_path)
    assert result.stdout.splitlines()[-1] == "[0, 0, 2, 0, 2, 2, 2, 2, 2, 2, 2, 0] []", result.stderr
    assert "error: 'trian' is not a command. Did you mean 'train'?" in result.stderr
    assert "error: command line: --x needs a value" in result.stderr
    meant = re.findall(r"command line --(\S+): .*no such key in .*Did you mean '(\S+)'\?", result.stderr)
    assert dict(meant) == {
        "optimizer.lerning_rate": "learning_rate",
        "trainer.nmu_train_steps": "num_train_steps",
        "model_name_or_path": "initialize_from_hf",
        "train_batch_size": "trainer.train_batch_size",
        "max_iters": "trainer.num_train_steps",
    }


def in_a_new_process(program, folder):
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


CALLED = """
    import sys, jaxlm
    assert "jax" not in sys.modules
    config = jaxlm.read_config("jaxlm:quickstart.yaml", {"trainer.log_dir": "logs", "dry_run": True})
    assert jaxlm.train is jaxlm.train, "a module"
    from jaxlm.__main__ import main as command
    codes = [command(["train", *arguments]) for arguments in (
        ["--help"], ["--help", "optimizer"], ["--help", "nothing"],
    )]
    from jaxlm.plan.load_config import load_config
    for name in ("prune", "lora", "qlora"):  # surgeries, which say how they change the model
        load_config(["--config_path", f"jaxlm:{name}.yaml", "--use_hf_model_config", "false"], "jaxlm.train")
    from jax._src import xla_bridge
    print(codes, xla_bridge.backends_are_initialized())
    import jaxlm.train
    from jaxlm import train as module
    from jaxlm.train import main, train
    assert (module.main, module.train) == (main, train)
    try:
        jaxlm.train(jaxlm.read_config("jaxlm:quickstart.yaml", {"trainer.id": "a/b"}))
    except jaxlm.core.errors.ConfigError as error:
        print(error)
    try:
        jaxlm.train("lora.yaml")
    except jaxlm.core.errors.ConfigError as error:
        print(error)
    print(jaxlm.train(config).outcome)
"""


@pytest.mark.slow
def test_help_starts_no_device_and_the_module_train_is_also_the_function(tmp_path):
    result = in_a_new_process(CALLED, tmp_path)
    assert "[0, 0, 2] False" in result.stdout.splitlines(), "help and surgeries start no device"
    assert "--optimizer.learning_rate  (float" in result.stdout
    assert "error: --help: there is no section or key 'nothing'" in result.stderr
    assert result.stdout.splitlines()[-1] == "Done()", result.stderr
    assert "trainer.id: 'a/b' given" in result.stdout
    assert "train: 'lora.yaml' given, a configuration expected. jaxlm.read_config(PATH) reads one" in result.stdout


def test_a_recipe_is_named_where_a_file_with_its_name_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"full path is .*/lora\.yaml\. The recipe of this name is jaxlm:lora\.yaml"):
        load_config(["--config_path", "lora.yaml"], "jaxlm.train")
