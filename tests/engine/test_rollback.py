"""Going back: the state and the place in the data are those of the checkpoint, and what follows repeats."""

from datetime import timedelta

import numpy as np
import pytest

from jaxlm.controllers.base import Rewind
from jaxlm.engine.checkpoint.local import LocalFolder
from jaxlm.engine.checkpoint.manifest import Cursor, History
from jaxlm.engine.checkpoint.policy import CheckpointerConfig
from jaxlm.engine.checkpoint.writer import CheckpointWriter, SaveHealth
from jaxlm.engine.phase_runner import PhaseRunner
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.optim.averaging import Ema
from jaxlm.optim.elementwise import AdamConfig
from tests.engine.helpers import Ready, TinyRun, arrays, layout, one_device, open_phase, phase
from tests.engine.test_step import assert_identical, host
from tests.tiers import one_of

MODEL = Gpt2Config(seq_len=16, hidden_dim=32, num_layers=2, num_heads=4, resid_pdrop=0.1)
SAVED, ABANDONED, REPEATED = 5, 100, 20


@pytest.mark.slow
@pytest.mark.parametrize("devices", one_of(["one", "eight"]))
def test_a_rollback_restores_every_bit_and_the_next_steps_repeat(tmp_path, devices):
    check_rollback(tmp_path, devices, AdamConfig(learning_rate=1e-2, warmup=0, telemetry=True))


def check_rollback(tmp_path, devices, optimizer):
    """Parameters, moments, averages, counts, telemetry, dropout's random numbers, and the place in the data."""
    own = phase(model=MODEL, end=200, optimizer=optimizer, averages={"ema": Ema()})
    run = TinyRun(one_device() if devices == "one" else layout(), own, model=MODEL)
    batches = Ready([arrays(seed) for seed in range(SAVED + ABANDONED)])
    folder = LocalFolder(tmp_path / "run")
    folder.prepare()
    health = SaveHealth(CheckpointerConfig(retry_for=timedelta(0)), None, print)
    writer = CheckpointWriter(folder, {"config.yaml": b"{}"}, health, print, lambda: None)

    def trained(num_steps: int) -> list[dict[str, float]]:
        return [run.step(next(batches)) for _ in range(num_steps)]

    trained(SAVED)
    with run.where.use():
        writer.save(run.state, Cursor(SAVED, 0, own.name, entering=False, temporary=False), batches.state())
    before = host(run)
    metrics, after = trained(REPEATED), host(run)
    trained(ABANDONED - REPEATED)

    phase_runner = PhaseRunner(run.state_builder, run.where, folder, print, None, History())
    bad = Rewind(SAVED + 1, SAVED + ABANDONED, "it went wrong", None, "a.key")
    with run.where.use():
        run.state = phase_runner.act(bad, run.state, open_phase(run.where, own, run.loop_step, batches))
    assert phase_runner.resumed is not None
    assert phase_runner.num_skipped == ABANDONED
    batches.restore(phase_runner.resumed.position())
    assert {"slots.ema", "slots.telemetry", "key", "step"} <= {".".join(path.split(".")[:2]) for path in before}
    assert_identical(host(run), before)
    assert trained(REPEATED) == metrics
    assert_identical(host(run), after)
    assert all(np.any(after[path] != before[path]) for path in before if path.startswith("model."))
    assert batches.taken[-REPEATED:] == [*range(SAVED, SAVED + REPEATED)]
