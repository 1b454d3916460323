"""A small student of a bigger teacher: killed and resumed, cached and live, on one device, eight, and two processes."""

import shutil

import pytest

from tests.end_to_end.commands import Workplace, check_close

pytestmark = pytest.mark.soak
BIG = ("--model.hidden_dim", "64", "--model.num_layers", "3", "--trainer.id", "big", "--trainer.num_train_steps", "30")
AVERAGED = ("--trainer.model_averaging", "{type: ema, beta: 0.9}")
LIVE = """
refs: {{teacher: {{type: hf, path: {teacher}, dtype: float32}}}}
objective: {{type: distill, divergence: js, temperature: 2.0}}
"""
TOP = """
refs: {{teacher: {{type: {type}, path: {teacher}, dtype: float32}}}}
objective: {{type: distill, top_k: 20, cache: {cache}}}
"""
FORMS = {
    "live": LIVE,
    "cached": TOP.replace("{type}", "hf").replace("{cache}", "true"),
    "top k": TOP.replace("{type}", "hf").replace("{cache}", "false"),
    "of a checkpoint": TOP.replace("{type}", "checkpoint").replace("{cache}", "false"),
}
PARALLELISM = {1: "8", 8: "1"}


@pytest.fixture(scope="session")
def teacher(workplace):
    """The folder of a teacher: its checkpoints, and `hf`, its last one in Hugging Face format."""
    place = workplace()
    place.write()
    place.finish("--config_path", "run.yaml", *BIG, *AVERAGED)
    arguments = ("to-hf", "--checkpoint", "checkpoints/big", "--output_dir", "hf")
    place.finish(*arguments, module="jaxlm.commands.convert")
    return place.folder


def prepared(workplace, teacher, form: str, devices: int = 1) -> Workplace:
    """A folder with the configuration, and caches of its own."""
    place = workplace(devices)
    path = teacher / ("checkpoints/big" if form == "of a checkpoint" else "hf")
    text = place.write(FORMS[form].format(teacher=path)).read_text()
    shutil.copytree(place.cache, place.folder / "cache", ignore=shutil.ignore_patterns("xla", "annotations"))
    (place.folder / "run.yaml").write_text(text.replace(f"cache_dir: {place.cache}\n", "cache_dir: cache\n"))
    return place


def arguments(devices: int) -> tuple[str, ...]:
    return ("--config_path", "run.yaml", "--trainer.per_device_parallelism", PARALLELISM[devices])


@pytest.fixture(scope="session")
def whole(workplace, teacher):
    """The uninterrupted run of each form and number of devices: (losses, hashes of its last checkpoint, folder, output)."""
    runs = {}

    def run(form: str, devices: int = 1):
        if (form, devices) not in runs:
            place = prepared(workplace, teacher, form, devices)
            finished = place.finish(*arguments(devices))
            runs[form, devices] = place.losses(), place.digest("step-24"), place, finished.out
        return runs[form, devices]

    return run


@pytest.mark.parametrize("devices", [8, 1])
def test_a_run_killed_in_the_second_phase_ends_the_same(whole, workplace, teacher, devices):
    place = prepared(workplace, teacher, "live", devices)
    kill(place, devices, "second phase")
    finish(place, devices, whole("live", devices))


@pytest.mark.parametrize("devices", [1, 8])
def test_killed_while_the_cache_is_written_and_in_training(whole, workplace, teacher, devices):
    place = prepared(workplace, teacher, "cached", devices)
    kill(place, devices, "annotating")
    assert [path.name for path in (place.folder / "cache" / "annotations").glob("*/block-*")] == ["block-0"]
    kill(place, devices, "second phase")
    finish(place, devices, whole("cached", devices))


def kill(place: Workplace, devices: int, where: str) -> None:
    place.die(*arguments(devices), at=where)


def finish(place: Workplace, devices: int, whole: tuple) -> None:
    """The run ends as if it had never been killed, and its checkpoint has nothing of the teacher."""
    losses, digest, *_ = whole
    finished = place.finish(*arguments(devices))
    assert "resuming, from" in finished.out
    assert place.losses() == losses
    assert place.digest("step-24") == digest
    assert not any(path.startswith("refs") for path in digest)


def test_a_cached_teacher_gives_the_losses_of_a_live_one_and_is_loaded_once(whole):
    losses, _, place, first = whole("cached")
    check_close(losses, whole("top k")[0], 1e-6)
    again = place.finish(*arguments(1), "--trainer.id", "again")
    assert place.losses("again") == losses
    for text in ("annotating", "refs.teacher: "):
        assert text in first
        assert text not in again.out


def test_the_average_of_a_checkpoint_is_another_teacher(whole, workplace, teacher):
    place = prepared(workplace, teacher, "of a checkpoint")
    average = ("--refs.teacher.weights", "ema")
    place.finish(*arguments(1), *average)
    assert place.losses() != whole("of a checkpoint")[0]
    unknown = place.run(*arguments(1), "--refs.teacher.weights", "swa", "--trainer.id", "other")
    assert unknown.code == 2
    assert "refs.teacher.weights: 'swa' given" in unknown.err
    assert "only has: trained, ema" in unknown.err


def test_a_checkpoint_is_the_same_teacher_as_its_export(whole):
    assert whole("of a checkpoint")[0] == whole("top k")[0]


@pytest.mark.parametrize("form", ["live", "cached"])
def test_eight_devices_and_two_processes_agree_with_one_device(whole, workplace, teacher, form):
    losses, *_ = whole(form)
    check_close(whole(form, 8)[0], losses, 1e-5)
    place = prepared(workplace, teacher, form)
    ends = place.run_all(2, *arguments(1))
    assert [end.code for end in ends] == [0, 0], ends
    check_close(place.losses(), losses, 1e-5)


# CI compares identities in tests/session/test_references.py.
def test_another_teacher_is_refused_on_resume(whole, workplace, teacher, tmp_path):
    *_, place, _ = whole("top k")
    shutil.copytree(teacher / "hf", tmp_path / "hf")
    path = "--refs.teacher.path"
    place.finish(*arguments(1), path, str(tmp_path / "hf"))
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    other = place.run(*arguments(1), path, str(tmp_path / "hf"))
    assert other.code == 2
    assert "refs.teacher.weights:" in other.err
    shutil.rmtree(tmp_path / "hf")
    missing = place.run(*arguments(1), path, str(tmp_path / "hf"))
    assert missing.code == 2
    assert "refs.teacher.path: " in missing.err
    assert "is not a folder" in missing.err
