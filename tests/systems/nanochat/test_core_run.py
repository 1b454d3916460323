"""CORE and the metrics of a whole run, in the real command: through a kill, and as `jaxlm evaluate` measures them."""

import json

import pytest

from jaxlm import train
from jaxlm.observe.logged_run import read_run
from jaxlm.observe.page.page import render
from tests.end_to_end.commands import Workplace
from tests.systems.nanochat.core_bundles import write_bundle

TASKS = ["copa", "winograd", "coqa"]
EVALS = """
evals:
  - {{type: loss}}
  - {{type: core, bundle: {bundle}, tasks: [{tasks}], max_per_task: 9, every: 2}}
  - {{type: samples, prompts: [def], max_new_tokens: 4, temperature: 0.0, every: 3}}
"""


def place_with_core(workplace, devices: int) -> Workplace:
    place = workplace(devices)
    bundle = write_bundle(place.folder / "bundle", num=9)
    place.write(EVALS.format(bundle=bundle, tasks=", ".join(TASKS)))
    return place


ARGUMENTS = ("--config_path", "run.yaml", "--trainer.steps_per_eval", "4")


@pytest.mark.soak
def test_a_killed_run_measures_the_same_as_a_whole_one(workplace):
    whole, killed = (place_with_core(workplace, 2) for _ in range(2))
    whole.finish(*ARGUMENTS)
    killed.die(*ARGUMENTS, at="second phase")
    result = killed.finish(*ARGUMENTS)
    assert "resuming" in result.out
    assert killed.numbers() == whole.numbers()

    found = whole.numbers()
    measured = {r["step"]: r for r in found if "eval/loss" in r}
    assert [step for step, r in measured.items() if "eval/core/copa" in r] == [8, 16, 24]
    assert "eval/core" not in measured[24]
    best = [min(r["eval/bpb"] for r in measured.values() if r["step"] <= step) for step in measured]
    assert [r["eval/best_bpb"] for r in measured.values()] == best
    texts = (whole.folder / "logs" / "run" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(text)["step"] for text in texts] == [12, 24]

    options = ("--core_bundle", "bundle", "--limit", "9")
    place = Workplace(whole.folder, whole.cache, whole.corpus, devices=1)
    names = ",".join(f"core/{task}" for task in TASKS)
    result = place.finish(
        "--checkpoint", "checkpoints/run", "--tasks", names, *options, module="jaxlm.commands.evaluate"
    )
    tasks = json.loads(result.out.splitlines()[-1])["tasks"]
    for name in TASKS:
        assert tasks[name]["accuracy"] == measured[24][f"eval/core/{name}/accuracy"]
        assert tasks[name]["centered"] == measured[24][f"eval/core/{name}"]
    text = render([read_run(str(killed.folder / "logs" / "run"))], 24.0)
    assert all(word in text for word in ("winograd", "training time, all starts", "best bits per byte", "24 per hour"))


def test_a_bundle_without_a_task_is_refused_before_anything_is_compiled(workplace, in_process):
    place = place_with_core(workplace, 1)
    (place.folder / "bundle" / "eval_data" / "some" / "winograd.jsonl").unlink()
    result = in_process(train.main, place, *ARGUMENTS)
    assert result.code == 2
    assert "compiling" not in result.out
    assert "it lacks 1 of the tasks of CORE: winograd (no file " in result.err
    assert "Traceback" not in result.err
