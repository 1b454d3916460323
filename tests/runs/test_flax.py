"""The worked examples in Flax by the real command: trained on text, killed and resumed, sampled, evaluated."""

import json
import signal

import pytest

from tests.runs.commands import REPOSITORY

GUIDE = REPOSITORY / "docs" / "howto" / "flax.md"


def sections() -> dict[str, str]:
    """The model sections of the guide: what is written there is what runs."""
    blocks = [block.split("```")[0] for block in GUIDE.read_text().split("```yaml\n")[1:]]
    return {kind: next(block for block in blocks if f"examples.{kind}_model" in block) for kind in ("nnx", "linen")}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "devices"), [("nnx", 8), ("linen", 1)])
def test_killed_and_resumed_it_is_the_same_run(workplace, kind, devices):
    places = [workplace(devices) for _ in range(2)]
    for place in places:
        text = place.write().read_text()
        before, _, behind = text.partition("model:\n")
        model = sections()[kind].replace("seq_len: 256", "seq_len: 32").replace("width: 256", "width: 32")
        (place.folder / "run.yaml").write_text(before + model + "trainer:\n" + behind.partition("trainer:\n")[2])
    whole, killed = places
    arguments = ("--config_path", "run.yaml")
    finished = whole.run(*arguments)
    assert finished.code == 0, finished.err
    process = killed.start(*arguments, module="tests.runs.dies", JAXLM_TEST_DIES_AT="second phase")
    process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL
    finished = killed.run(*arguments)
    assert finished.code == 0, finished.err
    assert "going on, from" in finished.out
    assert killed.losses() == whole.losses()
    assert killed.digest("step-24") == whole.digest("step-24")
    losses = [float.fromhex(loss) for loss in whole.losses().values()]
    assert losses[-1] < losses[0] - 0.5
    sampled = killed.run("--checkpoint", "checkpoints/run", "--max_new_tokens", "4", module="jaxlm.sample")
    assert sampled.code == 0, sampled.err
    assert "the module keeps no cache" in sampled.err
    evaluated = killed.run("--checkpoint", "checkpoints/run", module="jaxlm.evaluate")
    assert evaluated.code == 0, evaluated.err
    assert 0 < json.loads(evaluated.out.splitlines()[-1])["loss"] < losses[0]
