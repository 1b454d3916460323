"""States restored where `objective` and `trainer.mp` have changed: the objective's part is cast, dropped or made anew."""

from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision, parse_precision
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.restore import latest_valid, restore_state
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth
from jaxlm.engine.entry import StateBuilder
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, place_state
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.base import vocab_axis
from jaxlm.objectives.base import ObjectiveConfig
from jaxlm.objectives.dpo import Dpo
from jaxlm.objectives.kto import Kto
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.elementwise import LionConfig
from tests.engine.helpers import F32, VOCAB, one_device, phase

MODEL = LlamaConfig(seq_len=8, hidden_dim=16, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=2)
MIXED = parse_precision("p=f32,c=bfloat16")


def builder_of(objective: ObjectiveConfig, precision: Precision, **changes: Any) -> tuple[StateBuilder, Phase]:
    at = phase(objective=objective, optimizer=LionConfig(warmup=0), **changes)
    return StateBuilder(MODEL, vocab_axis(VOCAB), 0, precision, (at,)), at


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves the state at a step of a phase, whose model is not that of its start. Once for each combination."""
    made: dict[tuple[str, str, int], Any] = {}

    def save(objective: ObjectiveConfig, precision: Precision, step: int = 3) -> Any:
        key = (repr(objective), str(precision), step)
        if key not in made:
            builder, at = builder_of(objective, precision)
            abstract = builder.abstract_state(at)

            def moved() -> RunState:
                state = builder.initial_state(at)
                model = jax.tree.map(lambda leaf: leaf * (1.125 if step else 1), state.model)
                return RunState(
                    jnp.int32(step), state.key, model, state.opt_state, state.guard, slots=state.slots
                )  # the slot holds the model of the start

            folder = LocalFolder(tmp_path_factory.mktemp("run"))
            folder.prepare()
            health = SaveHealth(CheckpointerConfig(retry_for=timedelta(0)), None, print)
            writer = CheckpointWriter(folder, {"config.yaml": b"{}"}, health, print, lambda: None)
            with one_device().use():
                state = place_state(moved, abstract, one_device())
                writer.save(state, Cursor(step, 0, at.name, entering=not step, temporary=False), {})
            made[key] = latest_valid(folder, print), jax.tree.map(np.asarray, state)
        return made[key]

    return save


def restored(checkpoint: Any, objective: ObjectiveConfig, precision: Precision, **options: Any) -> tuple[Any, str]:
    """The state, and what was logged."""
    builder, at = builder_of(objective, precision)
    lines: list[str] = []
    with one_device().use():
        state = restore_state(checkpoint, builder, at, one_device(), lines.append, **options)
    wanted = builder.abstract_state(at)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(state)] == [(a.shape, a.dtype) for a in jax.tree.leaves(wanted)]
    return state, "\n".join(lines)


def arrays(part: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(tree.raw(leaf)) for path, leaf in tree.leaves(part)}


def check_same(found: Any, expected: Any) -> None:
    ours, theirs = arrays(found), arrays(expected)
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        np.testing.assert_array_equal(ours[path], array.astype(ours[path].dtype), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ((Dpo(), F32), (Dpo(), MIXED), "are cast from float32 to bfloat16"),
        ((Dpo(), MIXED), (Dpo(), F32), "are cast from bfloat16 to float32"),
        ((Dpo(), MIXED), (Dpo(sync_interval=1, sync_mixup=0.1), MIXED), "are cast from bfloat16 to float32"),
        ((Dpo(), F32), (Dpo(beta=0.5), F32), ""),
    ],
)
def test_a_held_reference_is_cast(saved, before, now, said):
    checkpoint, state = saved(*before)
    found, log = restored(checkpoint, *now)
    assert said in log if said else not log
    check_same(found, state)
    check_same(found.slots["objective"].weights, state.slots["objective"].weights)
    largest = max(np.abs(array).max() for array in arrays(state.model).values())
    assert any(np.any(a != b) for a, b in zip(arrays(found.model).values(), arrays(found.slots).values(), strict=True))
    assert largest > 0


@pytest.mark.slow
def test_an_objective_s_own_numbers_start_anew_and_what_it_does_not_keep_is_dropped(saved):
    checkpoint, state = saved(Dpo(), F32)
    found, log = restored(checkpoint, Kto(), F32)
    assert "objective: 3 arrays of its state are not in the checkpoint and start anew" in log
    check_same(found.slots["objective"].weights, state.slots["objective"].weights)
    assert {float(number) for number in found.slots["objective"].statistics.values()} == {0.0}
    for partial in (False, True):
        found, log = restored(checkpoint, NextToken(), F32, allow_partial=partial)
        assert "arrays that the checkpoint's objective kept are not needed" in log
        check_same(found.model, state.model)
    checkpoint, state = saved(NextToken(), F32)
    found, log = restored(checkpoint, NextToken(), F32, allow_partial=True)
    assert log == ""
    check_same(found, state)


@pytest.mark.slow
def test_a_reference_is_made_anew_only_at_the_start_of_its_phase(saved):
    checkpoint, state = saved(NextToken(), F32, step=0)
    for partial in (False, True):
        found, log = restored(checkpoint, Dpo(), MIXED, allow_partial=partial)
        assert "are not in the checkpoint and start anew" in log
        check_same(found.slots["objective"].weights, state.model)
        check_same(found.model, state.model)
        checkpoint_later, _ = saved(NextToken(), F32)
        with pytest.raises(
            ConfigError, match=r"phase 'train': the objective holds .* was saved with another objective"
        ):
            restored(checkpoint_later, Dpo(), MIXED, allow_partial=partial)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            "bf16",
            r"(?s)does not match this configuration in trainer\.mp:.*: checkpoint float32\[.*configuration bfloat16\[",
        ),
        ("p=f32,c=float16", r"(?s)in trainer\.mp:.*slots\.loss_scale\.scale: checkpoint has no such array, this conf"),
    ],
)
def test_another_precision_of_the_rest_is_refused_by_its_key(saved, now, message):
    checkpoint, _ = saved(NextToken(), F32)
    with pytest.raises(ConfigError, match=message) as refused:
        restored(checkpoint, NextToken(), parse_precision(now))
    assert "this model" not in str(refused.value)
    assert ("allow_partial_checkpoint" in str(refused.value)) == (now != "bf16")
