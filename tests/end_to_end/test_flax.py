"""The Flax examples with the real command: trained on text, killed and resumed, sampled, evaluated."""

import json

import pytest

from tests.end_to_end.commands import REPOSITORY

GUIDE = REPOSITORY / "docs" / "howto" / "flax.md"


def sections() -> dict[str, str]:
    """The model sections of docs/howto/flax.md, which are run as they are written."""
    blocks = [block.split("```")[0] for block in GUIDE.read_text().split("```yaml\n")[1:]]
    return {kind: next(block for block in blocks if f"examples.{kind}_model" in block) for kind in ("nnx", "linen")}


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "devices"), [("nnx", 8), ("linen", 1)])
def test_a_killed_and_resumed_run_is_identical(workplace, kind, devices):
    places = [workplace(devices) for _ in range(2)]
    for place in places:
        text = place.write().read_text()
        before, _, behind = text.partition("model:\n")
        model = sections()[kind].replace("seq_len: 256", "seq_len: 32").replace("width: 256", "width: 32")
        (place.folder / "run.yaml").write_text(before + model + "trainer:\n" + behind.partition("trainer:\n")[2])
    whole, killed = places
    arguments = ("--config_path", "run.yaml")
    whole.finish(*arguments)
    killed.die(*arguments, at="second phase")
    finished = killed.finish(*arguments)
    assert "resuming, from" in finished.out
    assert killed.losses() == whole.losses()
    assert killed.digest("step-24") == whole.digest("step-24")
    losses = [float.fromhex(loss) for loss in whole.losses().values()]
    assert losses[-1] < losses[0] - 0.5
    sampled = killed.finish("--checkpoint", "checkpoints/run", "--max_new_tokens", "4", module="jaxlm.commands.sample")
    assert "the module has no KV cache" in sampled.err
    evaluated = killed.finish("--checkpoint", "checkpoints/run", module="jaxlm.commands.evaluate")
    assert 0 < json.loads(evaluated.out.splitlines()[-1])["loss"] < losses[0]


QUICKSTART = """
trainer:
  num_train_steps: 48
  train_batch_size: 8
  steps_per_eval: 24
  max_eval_batches: 4
  log_dir: logs
  compilation_cache_dir: {cache}/xla
  checkpointer: {{base_path: checkpoints, save_interval: 1000s, keep: [{{every: 10}}]}}
optimizer: {{learning_rate: 2.0e-3, weight_decay: 0.1, warmup: 10}}
evals: [{{type: loss}}]
"""


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_training_on_the_quickstart_data(workplace, kind):
    """FSDP over eight devices gives the losses of one device, and a killed run ends like an uninterrupted one."""
    quickstart = (REPOSITORY / "config" / "quickstart.yaml").read_text()
    data = "data:" + quickstart.partition("data:")[2].partition("model:")[0]
    places = {name: workplace(devices) for name, devices in {"one": 1, "eight": 8, "killed": 8}.items()}
    for place in places.values():
        text = data.replace("cache/quickstart", str(place.cache / "quickstart")) + sections()[kind]
        (place.folder / "run.yaml").write_text(text + QUICKSTART.format(cache=place.cache))

    def finished(name):
        # Compiles with full optimization: here, the other tests' lower level would cost more than it saves.
        flags = f"--xla_force_host_platform_device_count={places[name].devices}"
        done = places[name].run("--config_path", "run.yaml", XLA_FLAGS=flags)
        assert done.code == 0, done.err
        return [float.fromhex(loss) for loss in places[name].losses().values()]

    one, eight = finished("one"), finished("eight")
    difference = max(abs(a - b) / a for a, b in zip(one, eight, strict=True))
    print(f"{kind}: loss {one[0]:.4f} to {one[-1]:.4f}; eight devices within {difference:.1e} of one")
    assert difference < 1e-5
    assert one[-1] < one[0] - 1.5
    flags = "--xla_force_host_platform_device_count=8"
    places["killed"].die(
        *("--config_path", "run.yaml"),
        at="second phase",
        XLA_FLAGS=flags,
    )
    assert finished("killed") == eight
    assert places["killed"].digest("step-48") == places["eight"].digest("step-48")
