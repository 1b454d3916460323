"""A run that drops two of its four layers after a phase: killed on the way, evaluated, sampled, exported."""

import json

import pytest

from jaxlm.commands import convert, evaluate, sample
from tests.end_to_end.commands import Workplace

PHASES = """
phases:
  - name: pretrain
    num_train_steps: 12
  - name: adapt
    num_train_steps: 12
    carry_optimizer: true
    surgery: [{type: drop_layers, num_layers: 2, calibration_batches: 2}]
"""


def start(workplace, devices: int = 1) -> Workplace:
    place = workplace(devices)
    path = place.write(PHASES)
    path.write_text(path.read_text().replace("num_layers: 2\n", "num_layers: 4\n", 1))
    return place


def dropped(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("drop_layers: ")]


@pytest.fixture(scope="module")
def whole(workplace):
    """The uninterrupted run, and what it logged."""
    place = start(workplace)
    finished = place.finish("--config_path", "run.yaml")
    return place, finished.out


@pytest.mark.soak
def test_killed_runs_drop_the_same_layers(whole, workplace):
    uninterrupted, said = whole
    place, lines = start(workplace), []
    for fault in ("after surgery", "second phase"):
        lines += dropped(place.die("--config_path", "run.yaml", at=fault).out)
    finished = place.finish("--config_path", "run.yaml")
    assert set(lines) == set(dropped(said)), "measured again until the checkpoint of the entry is there"
    assert not dropped(finished.out), "the checkpoint has the layers"
    assert place.losses() == uninterrupted.losses()
    assert place.digest("step-24") == uninterrupted.digest("step-24")


@pytest.mark.soak
def test_two_processes_drop_the_same_layers(whole, workplace):
    uninterrupted, said = whole
    place = start(workplace, devices=2)
    running = place.start_all(2, "--config_path", "run.yaml")
    ends = [(*process.communicate(timeout=500), process.returncode) for process in running]
    assert [code for _, _, code in ends] == [0, 0], ends
    number = lambda lines: [line.partition("are dropped")[0] for line in lines]  # noqa: E731
    assert number(dropped(ends[0][0])) == number(dropped(said)) != []
    ours, theirs = ({s: float.fromhex(loss) for s, loss in p.losses().items()} for p in (place, uninterrupted))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.soak
def test_commands_read_the_model_of_the_checkpoints_phase(whole, in_process):
    place, _ = whole
    for step, num_layers in ((12, 4), (24, 2)):
        checkpoint, folder = f"checkpoints/run/step-{step}", f"hf-{step}"
        arguments = ("to-hf", "--checkpoint", checkpoint, "--output_dir", folder, "--verify", "true")
        converted = in_process(convert.main, place, *arguments)
        assert converted.code == 0, converted.err
        assert "the same" in converted.out
        config = json.loads((place.folder / folder / "config.json").read_text())
        assert config["num_hidden_layers"] == num_layers
        evaluated = [in_process(evaluate.main, place, "--checkpoint", checkpoint, "--max_batches", "2")]
        files = f"[{place.corpus}/validation]"
        again = ("--checkpoint", folder, "--max_batches", "2", "--data.validation_urls", files, "--model.seq_len", "32")
        evaluated.append(in_process(evaluate.main, place, *again, "--batch_size", "16"))
        first, second = (json.loads(each.out.splitlines()[-1])["loss"] for each in evaluated)
        assert first == pytest.approx(second, rel=1e-5)
    sampled = in_process(
        sample.main, place, "--checkpoint", "checkpoints/run", "--prompt", "a", "--max_new_tokens", "4"
    )
    assert sampled.code == 0, sampled.err
