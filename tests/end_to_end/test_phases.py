"""Two phases, the second with LoRA on other text: killed in each, at the boundary, and between surgery and first save."""

import json

import pytest

from tests.end_to_end.commands import Workplace

TWO_PHASES = """
phases:
  - name: pretrain
    num_train_steps: 12
  - name: adapt
    num_train_steps: 12
    surgery: [{{type: lora, target: "attn|mlp", rank: 4, dropout: 0.1}}]
    trainable: ['\\.[ab]$']
    data: {{train_urls: [{corpus}/validation], cache_dir: {cache}-adapt}}
    optimizer: {{learning_rate: 3.0e-3}}
"""


def start(workplace, devices: int) -> Workplace:
    place = workplace(devices)
    place.write(TWO_PHASES.format(corpus=place.corpus, cache=place.cache))
    return place


@pytest.fixture(
    scope="session", params=[1, pytest.param(4, marks=pytest.mark.soak)], ids=["one device", "four devices"]
)
def whole(request, workplace):
    """The uninterrupted run: (devices, losses, hashes before and after the second phase)."""
    place = start(workplace, request.param)
    place.finish("--config_path", "run.yaml")
    return request.param, place.losses(), place.digest("step-12"), place.digest("step-24")


def base_of(path: str) -> str:
    return path.replace(".base.", ".")


@pytest.mark.soak
def test_frozen_leaves_do_not_change_and_have_no_optimizer_state(whole):
    _, losses, before, after = whole
    assert len(losses) == 24
    frozen = {path for path in after if path.startswith("model.") and not path.endswith((".a", ".b"))}
    assert {base_of(path): after[path] for path in frozen} == {
        p: h for p, h in before.items() if p.startswith("model.")
    }
    moments = [path for path in after if ".mu." in path or ".nu." in path]
    assert moments
    assert all(path.endswith((".a", ".b")) for path in moments)


FAULTS = ("boundary", "after surgery", "saving the entry", "second phase")
AROUND = FAULTS[1:]  # the first leaves the same files as the second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "faults"),
    [(1, AROUND), pytest.param(4, ("first phase", *FAULTS), marks=pytest.mark.soak)],
    indirect=["whole"],
    ids=["one device", "four devices"],
)
def test_a_run_killed_at_each_place_ends_the_same(whole, workplace, faults):
    """One run that is killed at each place in turn."""
    devices, losses, _, last = whole
    place = start(workplace, devices)
    for fault in faults:
        place.die("--config_path", "run.yaml", at=fault)
    place.finish("--config_path", "run.yaml")
    assert place.losses() == losses
    assert place.digest("step-24") == last
    assert place.checkpoints() == ["step-10", "step-12", "step-15", "step-20", "step-24", "step-5"]


@pytest.mark.soak
@pytest.mark.parametrize("whole", [1, 4], indirect=True)
def test_the_cursor_separates_entry_from_end_and_a_damaged_entry_is_rebuilt(whole, workplace):
    place = start(workplace, whole[0])
    place.die("--config_path", "run.yaml", at="second phase")
    assert "step-12-adapt" in place.checkpoints()
    cursor = json.loads((place.folder / "checkpoints/run/step-12-adapt/run/cursor.json").read_text())
    assert cursor == {"step": 12, "phase": 1, "phase_name": "adapt", "entering": True, "temporary": True}
    (place.folder / "checkpoints/run/step-12-adapt/run/cursor.json").write_text("{}")
    place.finish("--config_path", "run.yaml")
    assert place.losses() == whole[1]
    assert place.digest("step-24") == whole[3]
    assert "step-12-adapt.damaged" in place.checkpoints()
