"""A third-party package (tests/plugins/acme_lm): its classes in YAML, by name and by import path, and its program."""

import os

import pytest

from jaxlm import train
from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import load_config
from jaxlm.reading.choices import load_installed_plugins
from tests.end_to_end.commands import REPOSITORY, Workplace

ACME = REPOSITORY / "tests" / "plugins"
RUN = ("--config_path", "run.yaml")


@pytest.fixture(scope="module")
def installed(workplace) -> Workplace:
    """A workplace with the package "installed": it is on the path, with the entry point in its metadata."""
    place = workplace()
    metadata = place.folder / "site" / "acme_lm-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-lm\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[jaxlm.plugins]\nacme = acme_lm\n")
    return place


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
    broken = installed.folder / "broken" / "broken-2.0.dist-info"
    broken.mkdir(parents=True)
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-package\nVersion: 2.0\n")
    (broken / "entry_points.txt").write_text("[jaxlm.plugins]\nbroken = no_such_module\n")
    monkeypatch.syspath_prepend(str(broken.parent))
    load_installed_plugins.cache_clear()
    result = in_process(train.main, installed, "--help")
    assert result.code == 2
    assert "'broken' of the installed package broken-package" in result.err
    assert "No module named 'no_such_module'" in result.err
    assert "Traceback" not in result.err


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


@pytest.mark.slow
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
