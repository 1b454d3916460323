"""Scaling studies: the fit against closed forms, the members, and what a stopped study does again."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxlm.core.errors import ConfigError
from jaxlm.engine.checkpoint.lease import LeaseLostError
from jaxlm.reading.yaml import ConfigSource
from jaxlm.systems.nanochat import scaling_members
from jaxlm.systems.nanochat.commands import scaling as command
from jaxlm.systems.nanochat.scaling_law import TrainedPoint, fit_law
from jaxlm.systems.nanochat.scaling_members import (
    Member,
    MemberRayConfig,
    ScalingConfig,
    command_of,
    plan_study,
    run_command,
)

BUDGETS = (1e18, 1e19, 1e20)
STUDY: dict[str, Any] = {
    "preset": {"type": "depth_dial", "recipe": "seed", "aspect_ratio": 32, "head_dim": 16},
    "data": {"train_urls": ["corpus.txt"], "validation_urls": ["held-out.txt"], "vocab_size": 300},
    "model": {"seq_len": 32},
    "scaling": {"depths": [6, 2, 4], "budgets": [4e13, 1e13]},
}


STUDY_OF_ONE = ["--config_path", "mine.yaml", "--scaling.depths", "[2]", "--scaling.budgets", "[1.0e+13]"]


def profile(budget: float, lowest: float, tokens: float, width: float = 0.5) -> list[TrainedPoint]:
    """Losses that are a parabola over log10 N, with C = 6 N D."""
    sizes = lowest * 10.0 ** np.array([-0.7, -0.3, 0.1, 0.6])
    return [
        TrainedPoint(budget, round(n), round(tokens * lowest / n), 3.0 + width * np.log10(n / lowest) ** 2)
        for n in sizes
    ]


def test_parabolas_and_power_laws_come_out_as_they_went_in():
    points = [p for c in BUDGETS for p in profile(c, 0.3 * c**0.46, c / 6 / (0.3 * c**0.46))]
    law = fit_law(points[::-1])
    assert [p.budget for p in law.parabolas] == list(BUDGETS)
    for parabola in law.parabolas:
        assert parabola.num_parameters == pytest.approx(0.3 * parabola.budget**0.46, rel=1e-4)
        assert parabola.loss == pytest.approx(3.0, abs=1e-6)
        assert parabola.coefficients is not None
        assert parabola.coefficients[0] == pytest.approx(0.5, rel=1e-4)
        np.testing.assert_allclose(parabola.at(np.array([parabola.num_parameters])), 3.0, atol=1e-6)
    assert law.parameters is not None
    assert law.tokens is not None
    assert law.parameters.exponent == pytest.approx(0.46, abs=1e-5)
    assert law.parameters.factor == pytest.approx(0.3, rel=1e-3)
    assert law.tokens.exponent == pytest.approx(0.54, abs=1e-5)
    assert law.parameters.at(1e21) == pytest.approx(0.3 * 1e21**0.46, rel=1e-3)


def test_the_law_of_a_symmetric_loss_has_the_exponents_of_its_closed_form():
    """L = E + A / N^0.3 + B / D^0.3 with C = 6 N D is lowest at N = (A / B)^(1 / 0.6) (C / 6)^0.5, and symmetric around
    it in log N, so that the parabola has its minimum there."""
    a, b, alpha = 400.0, 300.0, 0.3
    points = []
    for budget in BUDGETS:
        best = (a / b) ** (1 / (2 * alpha)) * (budget / 6) ** 0.5
        for step in (-0.6, -0.3, 0.0, 0.3, 0.6):
            n = best * 10**step
            d = budget / 6 / n
            points.append(TrainedPoint(budget, round(n), round(d), 1.7 + a / n**alpha + b / d**alpha))
    law = fit_law(points)
    assert law.parameters is not None
    assert law.tokens is not None
    assert law.parameters.exponent == pytest.approx(0.5, abs=1e-6)
    assert law.tokens.exponent == pytest.approx(0.5, abs=1e-6)
    assert law.parameters.at(6e19) == pytest.approx((a / b) ** (1 / 0.6) * 1e19**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        ([3.0, 2.0, 1.4], "the minimum is outside the sizes: add larger depths"),
        ([1.4, 2.0, 3.0], "the minimum is outside the sizes: add smaller depths"),
        ([1.0, 2.0, 1.0], "the losses have no minimum: add smaller and larger depths"),
        ([1.0, 2.0], "2 sizes are trained; a parabola needs 3"),
    ],
)
def test_a_budget_without_a_minimum_says_why(losses, problem):
    points = [TrainedPoint(1e18, 10 ** (6 + n), 10 ** (9 - n), loss) for n, loss in enumerate(losses)]
    law = fit_law([*points, *profile(1e19, 1e8, 1e10)])
    assert law.parabolas[0].problem == problem
    assert law.parabolas[0].num_parameters is None
    assert law.parabolas[1].num_parameters == pytest.approx(1e8, rel=1e-6)
    assert law.parameters is None
    assert law.problem == "1 of 2 budgets have a minimum; a power law needs two"


def study(**own: Any) -> list[Member]:
    return plan_study(ConfigSource({**STUDY, **own}), "mine")[1]


def test_members_are_ordinary_runs_by_budget_and_depth():
    members = study()
    assert [(m.budget, m.depth) for m in members] == [(c, d) for c in (1e13, 4e13) for d in (2, 4, 6)]
    assert members[0].name == "mine-1e13-d2"
    for member in members:
        tree = yaml.safe_load(member.text)
        assert tree["preset"] == STUDY["preset"] | {"depth": member.depth, "target_flops": member.budget}
        assert "scaling" not in tree
        assert member.config.trainer.id == member.name == tree["trainer"]["id"]
        size, config = member.size, member.config
        assert size.num_steps == config.trainer.num_train_steps
        used = size.flops_per_token * size.num_tokens
        assert abs(used - member.budget) <= used / size.num_steps / 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"scaling": None}, r"scaling: missing"),
        ({"scaling": {"depths": [], "budgets": [1e13]}}, r"scaling\.depths: \[\] given, a list of different numbers"),
        ({"scaling": {"depths": [2, 2], "budgets": [1e13]}}, r"scaling\.depths: \[2, 2\] given"),
        ({"scaling": {"depths": [0], "budgets": [1e13]}}, r"scaling\.depths\.0: 0 given, an integer of 1 or more"),
        ({"scaling": {"depths": [2], "budgets": [10.0]}}, r"depth 2 with 10 FLOPs: preset\.target_flops: the run has"),
        (
            {"scaling": {"depths": [2], "budgets": [1e13], "metric": "eval/core"}},
            r"scaling\.metric: 'eval/core' given, but no evaluation measures it\. .* measures eval/loss, eval/bpb, ",
        ),
        (
            {"data": {"train_urls": ["corpus.txt"], "vocab_size": 300}},
            r"scaling\.metric: 'eval/bpb' given, but there is no validation data .* Set data\.validation_urls",
        ),
        ({"preset": None}, r"preset: missing"),
        ({"preset": {"type": "depth_dial", "depth": 4}}, r"preset\.depth: given beside scaling"),
        ({"trainer": {"num_train_steps": 5}}, r"trainer\.num_train_steps: given beside scaling"),
        ({"trainer": {"log_dir": "s3://bucket/logs"}}, r"trainer\.log_dir: 's3://bucket/logs' given, but results"),
        (
            {"trainer": {"distributed": {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}}},
            r"trainer\.distributed: given, but jaxlm scaling",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(own, message):
    with pytest.raises(ConfigError, match=message):
        study(**own)


class Trained:
    """Stands for the command of a member: writes the metrics of a run that has finished.

    Attributes:
        started: names of the members in the order in which they were started.
        failing: name of the member that ends with `code`.
    """

    def __init__(self):
        self.started: list[str] = []
        self.failing, self.code = "", 143

    def __call__(self, arguments) -> int:
        tree = yaml.safe_load(Path(arguments[-1]).read_text())
        name, budget = tree["trainer"]["id"], tree["preset"]["target_flops"]
        self.started.append(name)
        if name == self.failing:
            return self.code
        lowest = {1e13: 3.0, 4e13: 4.5}[budget]
        loss = 2.0 + (tree["preset"]["depth"] - lowest) ** 2 / 10 - budget / 1e14
        folder = Path("logs") / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"step": 1, "eval/bpb": 9.0, "eval/loss": 9.0}, {"step": 2, "eval/bpb": loss, "eval/loss": 2 * loss}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 0


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Trained:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(yaml.safe_dump(STUDY))
    stand_in = Trained()
    monkeypatch.setattr("jaxlm.systems.nanochat.scaling_members.run_command", stand_in)
    return stand_in


@pytest.mark.slow
def test_a_study_trains_every_member_once_and_writes_table_law_and_plot(trained, capsys):
    trained.failing = "mine-1e13-d6"
    assert command.main(["--config_path", "mine.yaml"]) == 143
    assert trained.started == ["mine-1e13-d2", "mine-1e13-d4", "mine-1e13-d6"]
    shown = capsys.readouterr()
    assert (
        "mine-1e13-d6 ended with exit code 143. To train it alone: jaxlm train --config_path scaling/members/"
        in shown.err
    )
    trained.failing, trained.started = "", []
    assert command.main(["--config_path", "mine.yaml"]) == 0
    assert trained.started == ["mine-1e13-d6", *(f"mine-4e13-d{depth}" for depth in (2, 4, 6))]
    saved = json.loads(Path("scaling/scaling.json").read_text())
    assert [(m["budget"], m["depth"]) for m in saved["members"][:2]] == [(1e13, 2), (1e13, 4)]
    assert len(saved["members"]) == 6
    assert saved["law"]["problem"] is None
    sizes = [budget["num_parameters"] for budget in saved["law"]["budgets"]]
    exponent = np.log(sizes[1] / sizes[0]) / np.log(4)  # two points lie on their line
    assert saved["law"]["num_parameters"]["exponent"] == pytest.approx(exponent, rel=1e-9)
    page = Path("scaling/scaling.md").read_text()
    assert f"N_opt = {saved['law']['num_parameters']['factor']:.4g} x C^{exponent:.4f}" in page
    assert "| 1e+13 | 2 | " in page
    assert Path("scaling/scaling.png").read_bytes()[:4] == b"\x89PNG"
    assert page.split("\n\n")[1] in capsys.readouterr().out
    # A third start trains nothing. Another metric is read from the logs.
    assert command.main(["--config_path", "mine.yaml", "--scaling.metric", "eval/loss"]) == 0
    assert len(trained.started) == 4
    again = json.loads(Path("scaling/scaling.json").read_text())
    assert again["members"][0]["value"] == pytest.approx(2 * saved["members"][0]["value"])


@pytest.mark.slow
def test_a_second_start_of_a_study_at_work_is_refused(trained, monkeypatch, capsys):
    codes = []

    def second(arguments) -> int:
        if not codes:
            codes.append(command.main(STUDY_OF_ONE))
        return trained(arguments)

    monkeypatch.setattr("jaxlm.systems.nanochat.scaling_members.run_command", second)
    assert command.main(STUDY_OF_ONE) == 0
    assert codes == [2]
    assert len(trained.started) == 1
    message = capsys.readouterr().err
    assert f"a study is already at work here (process {os.getpid()} on " in message
    assert f"both would write to {Path('scaling').absolute()}. Wait until" in message
    assert "or set another scaling.output_dir" in message


@pytest.mark.slow
def test_ctrl_c_on_a_cluster_keeps_the_results_and_says_how_to_go_on(trained, monkeypatch, capsys):
    closed = []

    def train_on_ray(members, config, log):
        try:
            yield members[0], trained(command_of(members[0]))
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(command, "train_on_ray", train_on_ray)
    assert command.main(["--config_path", "mine.yaml", "--scaling.ray", "{cpus: 1}"]) == 130
    assert closed
    assert "interrupted: 1 of the study's members have finished. Members that were training" in capsys.readouterr().err
    assert len(json.loads(Path("scaling/scaling.json").read_text())["members"]) == 1


def test_a_dry_run_lists_the_members_and_writes_nothing(trained, capsys, tmp_path):
    assert command.main(["--config_path", "mine.yaml", "--dry_run", "true"]) == 0
    assert trained.started == []
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert len([line for line in capsys.readouterr().out.splitlines() if "| mine-" in line]) == 6


@pytest.mark.slow
def test_a_member_that_fails_does_not_keep_others_from_training(trained):
    trained.failing, trained.code = "mine-1e13-d4", 1
    assert command.main(["--config_path", "mine.yaml"]) == 1
    assert len(trained.started) == 6
    assert len(json.loads(Path("scaling/scaling.json").read_text())["members"]) == 5


def test_budgets_that_share_a_name_are_refused(trained, capsys):
    assert command.main(["--config_path", "mine.yaml", "--scaling.budgets", "[1.0e+13, 10000000000000.1]"]) == 2
    assert "numbers that differ in 12 digits expected" in capsys.readouterr().err
    assert trained.started == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        [{"value": float("nan")}],
        [{"value": None}, {"value": "a"}, {"num_parameters": 0}, {"name": [1]}, {"name": "zz"}],
    ],
)
def test_a_damaged_result_is_one_message(trained, capsys, changes):
    assert command.main(STUDY_OF_ONE) == 0
    path = Path("scaling/members/mine-1e13-d2.json")
    whole = json.loads(path.read_text())
    for change in changes:
        path.write_text(json.dumps(whole | change))
        assert command.main(STUDY_OF_ONE) == 2
        assert "mine-1e13-d2.json: cannot be read" in capsys.readouterr().err
    path.write_text("[" * 100_000)
    assert command.main(STUDY_OF_ONE) == 2


@pytest.mark.slow
def test_results_of_other_keys_are_not_mixed_with_new_ones(trained, capsys):
    assert command.main(["--config_path", "mine.yaml"]) == 0
    assert command.main(["--config_path", "mine.yaml", "--trainer.seed", "1"]) == 2
    assert (
        "mine-1e13-d2 has finished with the keys in scaling/members/mine-1e13-d2.yaml, which" in capsys.readouterr().err
    )


def test_a_metric_that_was_not_measured_is_named_with_those_that_were(trained, capsys):
    assert command.main([*STUDY_OF_ONE, "--scaling.metric", "eval/wiki/loss"]) == 2
    assert (
        "'eval/wiki/loss' given, but logs/mine-1e13-d2/metrics.jsonl does not have it. It has eval/bpb, eval/loss"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(
    ("program", "code"), [("pass", 0), ("raise SystemExit(2)", 2), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_of_a_command(program, code):
    (member, *_) = study()
    python = command_of(member)[0]
    assert run_command([python, "-c", f"import os; {program}"]) == code


def test_a_cluster_that_does_not_answer_is_named():
    with pytest.raises(ConfigError, match=r"scaling\.ray\.address: '127\.0\.0\.1:1' cannot be reached \(.*refused"):
        next(scaling_members.train_on_ray(study(), MemberRayConfig(address="127.0.0.1:1"), print))


def test_a_member_that_fits_on_no_machine_is_refused():
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    scaling_members._check_room(nodes, MemberRayConfig(cpus=8, gpus=1))
    with pytest.raises(ConfigError, match=r"scaling\.ray: 9 cores and 0 GPUs .* have 8 cores and 1 GPUs"):
        scaling_members._check_room(nodes, MemberRayConfig(cpus=9))


def test_a_study_that_another_start_has_taken_measures_and_writes_nothing(tmp_path):
    def taken():
        raise LeaseLostError("another start has taken it")

    config = ScalingConfig([1], [1.0], output_dir=str(tmp_path))
    member: Any = None
    with pytest.raises(LeaseLostError):
        command._collect([(member, 0)], 1, config, [], taken)
    assert list(tmp_path.iterdir()) == []
