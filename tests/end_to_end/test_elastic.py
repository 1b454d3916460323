"""A run that resumes with fewer and fewer devices, and changes from FSDP to tensor parallelism and back."""

import json
from dataclasses import replace

import pytest

from tests.end_to_end.commands import Workplace, check_close

STEPS = 24
TENSOR = ("--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[mlp, heads]")
# Devices, mesh options, and the step at which the process is stopped.
LEGS = [(8, (), 7), (4, TENSOR, 13), (2, (), None)]
RUN = (
    *("--config_path", "run.yaml", "--trainer.num_train_steps", str(STEPS), "--optimizer.learning_rate", "1.0e-3"),
    "--trainer.watch",
    "{watch_targets: [batch], include_norms: false, include_per_parameter_norms: false, interval: 1}",
)


def logged(place: Workplace) -> dict[int, tuple[float, float]]:
    """Step -> (loss, hash of the batch); fails on a step that is logged twice."""
    found = {}
    for line in (place.folder / "logs" / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "train/loss" in record:
            assert record["step"] not in found
            found[record["step"]] = (record["train/loss"], record["data/batch_hash"])
    return found


@pytest.mark.slow
def test_resuming_on_eight_four_and_two_devices_gives_the_losses_of_one(workplace):
    reference = workplace(1)
    reference.write()
    reference.finish(*RUN)
    place = workplace()
    place.write()
    for devices, mesh, stop in LEGS:
        here = replace(place, devices=devices)
        if stop is None:
            here.finish(*RUN, *mesh)
        else:
            here.stop(*RUN, *mesh, at=stop)
            assert f"step-{stop}" in place.checkpoints()
    expected, found = logged(reference), logged(place)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert {step: batch for step, (_, batch) in found.items()} == {step: batch for step, (_, batch) in expected.items()}
    assert len({batch for _, batch in found.values()}) > STEPS // 2
    check_close(place.losses(), reference.losses())


VOCABULARY = ("--trainer.tensor_parallel_axes", "[vocab]", "--trainer.model_axis_size")


@pytest.mark.slow
@pytest.mark.soak
def test_resuming_where_the_vocabulary_is_padded_differently(workplace):
    """301 tokens are 304 on eight devices and 302 on two."""
    reference, place = workplace(1), workplace()
    options = ("--config_path", "run.yaml", "--data.vocab_size", "301", "--data.cache_dir", "cache")
    reference.write()
    reference.finish(*options)
    place.write()
    for devices, mesh, stop in ((8, "8", 9), (4, "2", 17)):
        result = replace(place, devices=devices).stop(*options, *VOCABULARY, mesh, at=stop)
        assert "the 301 tokens of the vocabulary do not divide by the" in " ".join(result.out.split())
    place.finish(*options)
    check_close(place.losses(), reference.losses())
