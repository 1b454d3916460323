"""A run that resumes with fewer and fewer devices, and changes from FSDP to tensor parallelism and back."""

import json
import signal
from dataclasses import replace

import pytest

from tests.end_to_end.commands import Workplace

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
            signal_options = {"JAXLM_TEST_SIGNAL": f"{int(signal.SIGTERM)}:0:{stop}"}
            result = here.run(*RUN, *mesh, module="tests.end_to_end.signaled", **signal_options)
            assert result.code == 128 + signal.SIGTERM, result.err
            assert f"step-{stop}" in place.checkpoints()
    expected, found = logged(reference), logged(place)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert {step: batch for step, (_, batch) in found.items()} == {step: batch for step, (_, batch) in expected.items()}
    assert len({batch for _, batch in found.values()}) > STEPS // 2
    worst = max(abs(found[step][0] / expected[step][0] - 1) for step in expected)
    assert worst < 1e-5


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
        here, signal_options = replace(place, devices=devices), {"JAXLM_TEST_SIGNAL": f"{int(signal.SIGTERM)}:0:{stop}"}
        result = here.run(*options, *VOCABULARY, mesh, module="tests.end_to_end.signaled", **signal_options)
        assert result.code == 128 + signal.SIGTERM, result.err
        assert "the 301 tokens of the vocabulary do not divide by the" in " ".join(result.out.split())
    place.finish(*options)
    expected, found = (
        {step: float.fromhex(loss) for step, loss in each.losses().items()} for each in (reference, place)
    )
    assert sorted(found) == sorted(expected) == list(range(1, 25))
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 1e-5
