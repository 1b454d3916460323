"""Keys of controllers and objectives without an effect are noted, and a trend that nobody follows."""

from dataclasses import replace
from typing import Any

import pytest

from jaxlm.controllers.reduce_on_plateau import ReduceOnPlateauConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.objectives.dpo import Dpo
from jaxlm.plan.controllers import controller_notes, objective_notes
from jaxlm.plan.load_config import load_config
from jaxlm.plan.plan import make_plan, plan_phases
from jaxlm.plan.run_config import PhaseConfig, RunConfig
from jaxlm.plan.trainer_config import TrainerConfig
from jaxlm.systems.orchestrate.orchestrator import NowcastTrials, OrchestratorConfig, PlannedSwitch
from jaxlm.systems.orchestrate.portfolio import Nowcast, PortfolioConfig
from jaxlm.systems.upcycle.blockwise import Autotune, Blockwise, Convergence
from tests.controllers.test_plan import PLATEAU

ASKED = OrchestratorConfig(interval=50, horizon=2, switch_at=[PlannedSwitch(30, "sgd_escape")])
MOVING = PortfolioConfig(telemetry=True, nowcast=Nowcast())


def noted(*phases: PhaseConfig, controllers: Any = (), **trainer: Any) -> list[str]:
    data = TokensConfig(num_validation_sequences=8)  # an orchestrator compares candidates on them
    sections = {"data": data, "optimizer": MOVING, "phases": list(phases)}
    config = RunConfig(trainer=TrainerConfig(controllers=list(controllers), **trainer), **sections)
    return controller_notes(config, plan_phases(config)[0])


def test_controllers_whose_keys_have_no_effect_are_noted():
    moved = replace(ASKED, nowcast=NowcastTrials(20, 20))
    assert noted(controllers=[moved], num_train_steps=200) == []
    short = "trainer.controllers.0: no effect in steps 1 to 80: interval: 50"
    assert noted(controllers=[moved], num_train_steps=80) == [short]
    one, two = PhaseConfig("one", num_train_steps=20), PhaseConfig("two", num_train_steps=200)
    late = replace(moved, switch_at=[PlannedSwitch(500, "sgd_escape")])
    place = "trainer.controllers.0: no effect in steps 1 to 20 and 21 to 220: switch_at.0.step: 500"
    assert noted(one, two, controllers=[late]) == [place]
    # `ASKED` would switch in the first phase, which goes on without it.
    assert noted(replace(one, num_train_steps=40, controllers=[]), replace(two, controllers=[moved])) == [
        "phases.1.controllers.0: no effect in steps 41 to 240: switch_at.0.step: 30"
    ]
    assert noted(replace(one, controllers=[]), controllers=[PLATEAU])[0] == (
        "trainer.controllers: no effect, because each phase has controllers of its own"
    )


def test_objectives_whose_keys_have_no_effect_are_noted():
    late = Blockwise(convergence=Convergence(patience=20, max_steps=2000), autotune=Autotune("active", patience=600))
    config = RunConfig(trainer=TrainerConfig(num_train_steps=500))
    phases = plan_phases(replace(config, phases=[PhaseConfig("one"), PhaseConfig("two", num_train_steps=5)]))[0]
    shared, own = replace(phases[0], objective=late), replace(phases[1], objective=Dpo(sync_interval=7))
    written = [PhaseConfig("one"), PhaseConfig("two", objective=own.objective)]
    assert objective_notes(replace(config, objective=late, phases=written), [shared, own]) == [
        "objective: no effect in steps 1 to 500: convergence.max_steps: 2000; autotune.patience: 600",
        "phases.1.objective: no effect in steps 501 to 505: sync_interval: 7",
    ]
    assert objective_notes(replace(config, objective=late, phases=[]), [replace(shared, end=3000)]) == []
    plateau = ReduceOnPlateauConfig("train/loss", patience=80)
    assert noted(controllers=[plateau], num_train_steps=50)[0] == (
        "trainer.controllers.0: no effect in steps 1 to 50: patience: 80"
    )


@pytest.mark.parametrize("controllers", [[], [ASKED], [replace(ASKED, mode="monitor", nowcast=NowcastTrials(20, 20))]])
def test_a_trend_that_no_controller_follows_is_noted(controllers):
    (note,) = noted(PhaseConfig("one"), controllers=controllers, num_train_steps=200)
    assert note.startswith("optimizer.nowcast of phase 'one': no controller moves the weights, so it only costs memory")


def test_a_short_try_of_the_recipe_starts_with_a_note():
    def warnings(*overrides: str) -> list[str]:
        config = load_config(["--config_path", "jaxlm:orchestrate.yaml", *overrides], "jaxlm train")
        return [line for line in make_plan(config, "x", 4096).warnings if "controllers" in line]

    assert warnings() == []
    (note,) = warnings("--trainer.num_train_steps", "20")
    assert note == (
        "trainer.controllers.0: no effect in steps 1 to 20: interval: 100; horizon: 20 (a trial costs 24 steps, and"
        " branch_budget: 0.1 allows 1); safety.quarantine: 20 (no checkpoint is old enough to go back to)"
    )
