"""FLOPs of runs that distill layer by layer."""

import pytest

from jaxlm.session.references import flops_per_token
from tests.session.test_references import STUDENT, folder, plan_of, tokenizer  # noqa: F401 - two are fixtures

ATTENTION, MLP, SCORES = 4 * 32 * 32, 3 * 32 * 48, 12 * 32 * 16 / 2  # of a layer; FLOPs of scores forward and backward
MIXED = 6 * ATTENTION + SCORES
LAYER_FORWARD = 2 * (ATTENTION + MLP) + SCORES / 3
SEQUENTIAL = {"order": "sequential", "convergence": {"max_steps": 4, "min_steps": 1}}


@pytest.mark.parametrize(
    ("objective", "trainable", "expected"),
    [
        ({}, r"\.attn\.", 2 * MIXED),
        ({}, r"attn\.q_proj", 2 * (MIXED - 2 * 3 / 4 * ATTENTION)),
        ({"target": "residual"}, r"\.layers\.", 2 * (MIXED + 6 * MLP)),
        ({"inputs": "student"}, r"\.attn\.", 2 * (MIXED + 2 * MLP)),
        (SEQUENTIAL, r"\.attn\.", MIXED),
        # The second block reads what the first one computes.
        (SEQUENTIAL | {"inputs": "student"}, r"\.attn\.", MIXED + LAYER_FORWARD / 2),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_blockwise_distillation_are_those_of_the_layers_that_it_runs(
    folder,  # noqa: F811
    tokenizer,  # noqa: F811
    objective,
    trainable,
    expected,
    tied,
):
    model = STUDENT | {"num_layers": 2, "tie_word_embeddings": tied}
    phases = [{"name": "train", "trainable": [trainable], "num_train_steps": 8}]

    def counted(**keys):
        plan = plan_of(
            folder, tokenizer, model=model, phases=phases, objective={"type": "blockwise", **objective, **keys}
        )
        return flops_per_token(plan, plan.phases[0]).causal

    teacher = 2 * (2 * (2 * 64 * (4 + 2) * 16 + 3 * 64 * 64) + 4 * 64 * 16 / 2)  # its head is not needed either
    assert counted() == pytest.approx(expected + teacher)
    assert counted(cache=True) == pytest.approx(expected)
