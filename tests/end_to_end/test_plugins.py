"""A third-party package (tests/plugins/acme_lm): its classes in YAML, by name and by import path, and its program."""

import os
from pathlib import Path

import pytest

from jaxlm import train
from jaxlm.commands import bench
from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import load_config
from jaxlm.reading.choices import load_installed_plugins
from jaxlm.session.command_parts import CommandPart
from tests.end_to_end.commands import REPOSITORY, Workplace

ACME = REPOSITORY / "tests" / "plugins"
RUN = ("--config_path", "run.yaml")


@pytest.fixture(scope="module")
def installed(workplace) -> Workplace:
    """A workplace with the package "installed": it is on the path, with the entry point in its metadata."""
    place = workplace()
    _install(place.folder / "site", "acme-lm", "acme = acme_lm")
    return place


def _install(site: Path, package: str, entry_point: str) -> None:
    metadata = site / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[jaxlm.plugins]\n{entry_point}\n")


def environment(place: Workplace) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY / "src", REPOSITORY, ACME, place.folder / "site")))}


@pytest.mark.slow
def test_plugin_classes_train_and_their_checkpoint_is_read(installed):
    installed.write(
        """
        objective: {type: "acme_lm.objective:FrontLoaded", front_weight: 3.0}
        """
    )
    text = (installed.folder / "run.yaml").read_text()
    head, _, rest = text.partition("model:")
    model = 'model: {type: "acme_lm.model:MeanOfPastConfig", seq_len: 32, width: 32}\n'
    text = head + model + rest[rest.index("trainer:") :]
    text = text.replace("optimizer: {", "optimizer: {type: acme_sign, ")
    (installed.folder / "run.yaml").write_text(text)
    options = (
        "--trainer.tracker",
        "[{type: acme_csv, path: all.csv}]",
        "--trainer.callbacks",
        '[{type: "acme_lm.callback:SlowestConfig"}]',
        "--greeting",
        "good day",
        "--optimizer.learning_rate",
        "0.04",
        "--data.train_urls",
        "[]",
        "--data.validation_urls",
        "[]",
        "--data.cache_dir",
        "sums",
        "--data.source",
        "{type: acme_sums, num_records: 4000}",
    )
    result = installed.finish(*RUN, *options, module="acme_lm.program", **environment(installed))
    assert result.out.startswith("good day\n")
    losses = [float.fromhex(loss) for loss in installed.losses().values()]
    assert losses[-1] < losses[0] - 0.3
    rows = [line.split(",") for line in (installed.folder / "all.csv").read_text().splitlines()]
    assert {row[0]: row[2] for row in rows if row[1] == "train/loss"}["24"] == repr(losses[-1])
    assert (installed.folder / "slowest.txt").read_text().endswith(" of 24")
    # The program's own keys are not saved; all other keys are read by every command, through the same import paths.
    evaluated = installed.finish(
        "--checkpoint", "checkpoints/run", module="jaxlm.commands.evaluate", **environment(installed)
    )
    records = installed.records()
    logged = next(r["eval/loss"] for r in reversed(records) if "eval/loss" in r)
    assert f"{logged:.4f}" in evaluated.out


def test_a_plugin_that_cannot_be_loaded_is_named(installed, in_process, monkeypatch):
    _install(installed.folder / "broken", "broken-package", "broken = no_such_module")
    monkeypatch.syspath_prepend(str(installed.folder / "broken"))
    load_installed_plugins.cache_clear()
    result = in_process(train.main, installed, "--help")
    assert result.code == 2
    assert "'broken' of the installed package broken-package" in result.err
    assert "No module named 'no_such_module'" in result.err
    assert "Traceback" not in result.err


_COUNTDOWN = """
from jaxlm.reading.choices import choice
from jaxlm.session.command_parts import CommandPart

@choice(CommandPart, "bench countdown")
class Countdown(CommandPart):
    def add_options(self, parser):
        parser.add_argument("--countdown", type=int)

    def run(self, options, rest):
        return None if options.countdown is None else print(*range(options.countdown, 0, -1)) or 0
"""


def test_an_installed_plugin_adds_an_option_to_a_command(workplace, in_process, monkeypatch):
    place = workplace()
    _install(place.folder / "site", "countdown", "countdown = acme_countdown")
    (place.folder / "site" / "acme_countdown.py").write_text(_COUNTDOWN)
    monkeypatch.setattr(CommandPart, "_choice_registry", dict(CommandPart._choice_registry))
    monkeypatch.syspath_prepend(str(place.folder / "site"))
    load_installed_plugins.cache_clear()
    result = in_process(bench.main, place, "--countdown", "3")
    assert (result.code, result.out) == (0, "3 2 1\n"), result.err
    assert "--countdown" in in_process(bench.main, place, "--help").out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Thing", "importing no_such_module failed: ModuleNotFoundError"),
        ("json:Thing", "there is nothing of that name in json"),
        ("json:JSONDecoder", "there is no dataclass that extends jaxlm.optim.base.OptimizerConfig of that name"),
        ("jaxlm.objectives.next_token:NextToken", "no dataclass that extends jaxlm.optim.base.OptimizerConfig"),
    ],
)
def test_a_missing_class_is_named(name, message):
    with pytest.raises(ConfigError, match=rf"optimizer\.type: '{name}'.*{message}"):
        load_config(["--optimizer.type", name], "test")


@pytest.mark.soak
def test_a_kind_of_data_with_columns_of_its_own_trains_and_is_evaluated(installed):
    path = installed.write('objective: {type: "acme_lm.graded:GradedLoss"}\n', name="graded")
    path.write_text(path.read_text().replace("data:\n", 'data:\n  type: "acme_lm.graded:GradedData"\n'))
    arguments = ("--config_path", "graded.yaml", "--trainer.id", "graded")
    installed.finish(*arguments, **environment(installed))
    losses = [float.fromhex(loss) for loss in installed.losses("graded").values()]
    assert losses[-1] < losses[0] - 0.3
    installed.finish(*arguments, "--show_batch", "3", module="jaxlm.commands.prepare", **environment(installed))
    refused = installed.run(*arguments, "--objective.type", "next_token", **environment(installed))
    assert refused.code == 2
    assert "objective.type: next_token cannot train on data.type: acme_lm.graded:GradedData" in refused.err
    unscored = ("--data.type", "acme_lm.graded:UnscoredData")
    refused = installed.run(*arguments, *unscored, **environment(installed))
    assert refused.code == 2
    assert "the evaluation 'loss' reads `supervised()` of a batch, which UnscoredBatch does not define" in refused.err
