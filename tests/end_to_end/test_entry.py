"""Phases that take over values from data, a reference or the optimizer before, and are killed around their entry."""

import json
import shutil

import numpy as np
import pytest
import yaml

from tests.end_to_end.commands import Workplace

EVA = """
phases:
  - name: pretrain
    num_train_steps: 12
  - name: adapt
    num_train_steps: 12
    surgery: [{type: lora, target: "attn|mlp", rank: 4, init: eva, calibration_batches: 3}]
    trainable: ['\\.[ab]$']
    optimizer: {learning_rate: 3.0e-3}
"""
AVERAGE = """
refs: {{base: {{type: checkpoint, path: "{base}", dtype: float32}}}}
phases:
  - name: pretrain
    num_train_steps: 6
  - name: average
    num_train_steps: 6
    surgery: [{{type: interpolate, ref: base, weight: 0.25, match: "body|tokens"}}]
"""


def killed(place: Workplace, fault: str) -> None:
    place.die("--config_path", "run.yaml", at=fault)


def finished(place: Workplace) -> str:
    result = place.finish("--config_path", "run.yaml")
    return result.out


def losses(place: Workplace) -> dict[int, float]:
    return {step: float.fromhex(loss) for step, loss in place.losses().items()}


def arrays(place: Workplace, checkpoint: str) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    folder = str(place.folder / "checkpoints" / "run" / checkpoint / "state")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        paths = reader.metadata(folder).item_metadata.tree
        as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths}
        return reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


@pytest.mark.soak
def test_a_calibrated_phase_is_entered_once(workplace):
    """Killed before the entry's checkpoint is saved, it measures again; killed after, it does not. The bits are the same."""
    whole, place = workplace(), workplace()
    whole.write(EVA)
    finished(whole)
    place.write(EVA)
    for fault in ("after surgery", "second phase"):
        killed(place, fault)
    entry = arrays(place, "step-12-adapt")
    path = "model.body.layers.stacked.attn.q_proj"
    rows = entry[f"{path}.a"]
    np.testing.assert_allclose(np.einsum("lri,lsi->lrs", rows, rows), [np.eye(4)] * 2, atol=1e-5)
    assert not entry[f"{path}.b"].any()
    finished(place)
    assert place.losses() == whole.losses()
    assert place.digest("step-24") == whole.digest("step-24")


@pytest.mark.soak
def test_two_processes_measure_what_one_does(workplace):
    """Each reads half of the calibration batches. The components are those of all of them."""
    alone, place = workplace(), workplace(2)
    for each in (alone, place):
        each.write(EVA)
    finished(alone)
    running = place.start_all(2, "--config_path", "run.yaml")
    ends = [(*process.communicate(timeout=500), process.returncode) for process in running]
    assert [code for _, _, code in ends] == [0, 0], ends
    assert losses(place) == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.soak
def test_a_reference_may_be_gone_once_the_phase_that_reads_it_is_entered(workplace, finished_base):
    whole, place = workplace(), workplace()
    for each in (whole, place):
        shutil.copytree(finished_base, each.folder / "base")
        each.write(AVERAGE.format(base="base"), num_steps=12)
    finished(whole)
    killed(place, "after the entry")
    before, entry, base = (arrays(place, name) for name in ("step-6", "step-6-average", "../../base"))
    for path in (path for path in entry if path.startswith("model.")):
        moves = path.startswith(("model.body", "model.tokens"))
        expected = 0.75 * before[path] + 0.25 * base[path] if moves else before[path]
        np.testing.assert_allclose(entry[path], expected, rtol=1e-6, atol=1e-7, err_msg=path)
    saved = (place.folder / "checkpoints/run/step-6-average/run/refs.json").read_text()
    shutil.rmtree(place.folder / "base")
    assert "references" in place.run("--config_path", "run.yaml", "--dry_run", "true").out
    finished(place)
    assert place.losses() == whole.losses()
    assert place.digest("step-12") == whole.digest("step-12")
    assert json.loads((place.folder / "checkpoints/run/step-12/run/refs.json").read_text()) == json.loads(saved)


@pytest.mark.soak
def test_a_reference_is_needed_until_then(workplace, finished_base):
    place = workplace()
    shutil.copytree(finished_base, place.folder / "base")
    place.write(AVERAGE.format(base="base"), num_steps=12)
    killed(place, "after five steps")
    shutil.rmtree(place.folder / "base")
    refused = place.run("--config_path", "run.yaml")
    assert refused.code == 2
    assert "refs.base.path: no checkpoint at base" in refused.err


@pytest.fixture(scope="module")
def finished_base(uninterrupted):
    """The newest checkpoint of another run with the same tokenizer."""
    return uninterrupted.place.folder / "checkpoints" / "run" / "step-24"


def write_mixture(place: Workplace, *, phases: int) -> None:
    """A run on one source until step 11, then on the other."""
    run = yaml.safe_load(place.write().read_text())
    source = {"ast": ["ast.py"], "rest": ["argparse.py", "inspect.py"]}
    configs = {name: {"train_urls": [f"{place.corpus}/train/{url}" for url in urls]} for name, urls in source.items()}
    only = [{"ast": 1, "rest": 0}, {"ast": 0, "rest": 1}]
    data = {"configs": configs, "vocab_size": 300, "cache_dir": "cache", "mixture_block_size": 16}
    run["optimizer"] = {"learning_rate": 1e-2, "warmup": 4, "lr_schedule": "cosine", "skip_bad_steps": 8}
    run["trainer"] |= {"model_averaging": {"type": "ema", "beta": 0.7}, "mp": "p=f32,c=float16"}
    if phases == 1:
        run["data"] = data | {"train_weights": [[0, only[0]], [11, only[1]]]}
    else:
        first, second = ({"data": data | {"train_weights": weights}} for weights in only)
        run["phases"] = [
            {"name": "a", "num_train_steps": 11, **first},
            {"name": "b", "num_train_steps": 13, "carry_optimizer": True, **second},
        ]
        run |= first
    (place.folder / "run.yaml").write_text(yaml.safe_dump(run))


@pytest.mark.soak
def test_two_phases_that_carry_the_optimizer_are_one(workplace):
    """Other data from step 11 on, as a stage of a mixture and as a phase: the same losses and the same state, bit for bit."""
    one, two = workplace(), workplace()
    write_mixture(one, phases=1)
    write_mixture(two, phases=2)
    finished(one)
    killed(two, "second phase")
    finished(two)
    assert one.losses() == two.losses()
    states = one.digest("step-24"), two.digest("step-24")
    assert {path for path in states[0] if path.startswith(("opt_state", "slots", "guard"))}
    assert states[0] == states[1]
