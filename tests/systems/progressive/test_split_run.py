"""A second phase that trains only the upper of two stacks: frozen bit for bit, exported and sampled."""

import numpy as np
import pytest

import jaxlm
from tests.end_to_end.commands import Workplace

pytestmark = pytest.mark.slow

TEXT = "def name(self):\n    return self\n"
PHASES = """
phases:
  - name: whole
    num_train_steps: 12
  - name: upper
    num_train_steps: 12
    surgery: [{type: split_at, layer: 1}]
    trainable: ['^body\\.1\\.', '^head']
"""


def start(workplace, devices: int) -> Workplace:
    place = workplace(devices)
    place.write(PHASES)
    return place


@pytest.fixture(
    scope="session", params=[1, pytest.param(8, marks=pytest.mark.soak)], ids=["one device", "eight devices"]
)
def whole(request, workplace):
    """The uninterrupted run: (its place, losses, hashes before and after the second phase)."""
    place = start(workplace, request.param)
    place.finish("--config_path", "run.yaml")
    return place, place.losses(), place.digest("step-12"), place.digest("step-24")


@pytest.mark.soak
def test_the_lower_stack_and_the_embedding_do_not_change(whole):
    _, losses, before, after = whole
    assert len(losses) == 24
    assert after["model.tokens.weight"] == before["model.tokens.weight"]
    moments = [path for path in after if ".mu." in path or ".nu." in path]
    assert any(".body.1." in path for path in moments)
    assert not [path for path in moments if ".body.0." in path or ".tokens." in path]
    # One of two layers, so the bytes of a stack are not those of the whole array; `step-15` has them too.
    lower = {path: value for path, value in after.items() if path.startswith("model.body.0.")}
    assert lower
    earlier = whole[0].digest("step-15")
    assert {path: earlier[path] for path in lower} == lower
    assert earlier["model.head.weight"] != after["model.head.weight"]


@pytest.mark.soak
@pytest.mark.parametrize("whole", [1, 8], indirect=True)
def test_its_checkpoint_is_exported_and_sampled_as_the_whole_model(whole):
    """`--verify` reads the folder with transformers if it is installed. What it predicts is what the checkpoint does."""
    place = whole[0]
    exported = place.finish(
        *("to-hf", "--checkpoint", "checkpoints/run", "--output_dir", "exported", "--verify", "true"),
        module="jaxlm.commands.convert",
    )
    assert "logits within" in exported.out
    for name in ("checkpoints/run", "exported"):
        place.finish("--checkpoint", name, "--prompt", "def ", "--max_new_tokens", "4", module="jaxlm.commands.sample")
    # Two of 300 tokens can be equally likely but for the rounding, so what is sampled need not be the same.
    scores = [jaxlm.load(place.folder / name).log_probs([TEXT]) for name in ("checkpoints/run", "exported")]
    np.testing.assert_allclose(scores[1][0], scores[0][0], atol=1e-4)
