"""kill -9 at a random moment, then the same command again: bit for bit the uninterrupted run."""

import json
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from jaxlm.observe.ledger import account, read_lines
from tests.end_to_end.commands import Workplace, check_close
from tests.tiers import one_of

TENSOR_PARALLEL = ("--trainer.model_axis_size", "2", "--trainer.tensor_parallel_axes", "[mlp, heads]")
MESHES = {
    "one device": (1, ()),
    "fsdp 8": (8, ()),
    "tp 2 x fsdp 4": (8, TENSOR_PARALLEL),
}
FLOAT32_ROUTER = (
    *("--model.type", "mixtral", "--model.num_experts", "4"),
    *("--trainer.mp", r"{default: 'p=f32,c=bfloat16', rules: [{match: '\.router\.', compute: f32}]}"),
)
GROUPS = """[
  {match: ^tokens, learning_rate: 5e-3, beta2: 0.99},
  {match: norm, type: lion, learning_rate: 1e-3, lr_schedule: constant},
  {match: attn|mlp, type: muon, learning_rate: 3e-3, weight_decay: 0.01}
]"""
FOUR_GROUPS = {
    "four groups, one device": (1, ("--optimizer.groups", GROUPS)),
    "four groups, fsdp 8": (8, ("--optimizer.groups", GROUPS)),
}
KRON = ("--optimizer.type", "kron", "--optimizer.learning_rate", "3e-3")
SOAP = ("--optimizer.type", "soap", "--optimizer.learning_rate", "3e-3", "--optimizer.precondition_frequency", "3")
MUON = (
    "--optimizer.type",
    "muon",
    "--optimizer.learning_rate",
    "3e-3",
    "--optimizer.momentum_schedule",
    "{warmup: 20}",
)
MUON += ("--optimizer.normuon_beta2", "0.9", "--optimizer.weight_decay_schedule", "cosine")
HYBRID = {
    "type": "qwen3_5_moe",
    **{"head_dim": 8, "num_state_heads": 2, "num_value_heads": 4, "state_key_dim": 8, "state_value_dim": 8},
    **{"attention_interval": 2, "num_experts": 4, "num_experts_per_token": 2, "shared_expert_intermediate_dim": 24},
}
OTHERS = {
    "hybrid with experts and a layer that predicts further tokens, one device": (
        1,
        (
            *(part for key, value in {**HYBRID, "mtp": True}.items() for part in (f"--model.{key}", str(value))),
            *("--objective.mtp_weight", "0.3"),
        ),
    ),
    "kron, float32 router, one device": (1, (*KRON, *FLOAT32_ROUTER)),
    "kron, float32 router, tp 2 x fsdp 2": (4, (*KRON, *FLOAT32_ROUTER, *TENSOR_PARALLEL)),
    "adam-mini, fsdp 8": (8, ("--optimizer.type", "adam-mini")),
    "soap, tp 2 x fsdp 4": (8, (*SOAP, *TENSOR_PARALLEL)),
    "muon with its options, fsdp 8": (8, MUON),
    "adam in 8 bits, fsdp 8": (8, ("--optimizer.state", "{type: 8bit, min_size: 256}")),
}
SETTINGS = MESHES | OTHERS | FOUR_GROUPS
# Two microbatches.
PARALLELISM = {name: str(16 // n if "tp 2" in name else 8 // n) for name, (n, _) in SETTINGS.items()}


def arguments(mesh: str) -> list[str]:
    parallelism = () if mesh == "one device" else ("--trainer.per_device_parallelism", PARALLELISM[mesh])
    return ["--config_path", "run.yaml", *parallelism, *SETTINGS[mesh][1]]


@pytest.fixture(scope="session")
def uninterrupted(workplace, finished):
    """The uninterrupted run, once per mesh: (losses, hashes of its last checkpoint)."""

    @cache
    def run(mesh: str):
        if mesh == "one device":
            return finished.losses(), finished.digest("step-24")
        place = workplace(SETTINGS[mesh][0])
        place.write_averaged()
        place.finish(*arguments(mesh))
        return place.losses(), place.digest("step-24")

    return run


def kill(place: Workplace, mesh: str, wait_s: float, *, in_start: bool = False) -> None:
    """Kills the run some time after its start, or after it has finished another checkpoint."""
    saved = finished_checkpoints(place)
    process = place.start(*arguments(mesh))
    while not in_start and process.poll() is None and finished_checkpoints(place) <= saved:
        time.sleep(0.01)
    time.sleep(wait_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def finished_checkpoints(place: Workplace) -> set[str]:
    return {name for name in place.checkpoints() if name.startswith("step-") and name.removeprefix("step-").isdigit()}


def killed_at_random(place: Workplace, mesh: str, rng: random.Random, kills: int) -> None:
    for _ in range(kills):
        in_start = rng.random() >= 0.7
        kill(place, mesh, rng.uniform(0.5, 6.0) if in_start else rng.uniform(0.0, 1.0), in_start=in_start)


def check(workplace, uninterrupted, mesh: str, seed: int, kills: int) -> Workplace:
    return check_killed(
        workplace, uninterrupted, mesh, lambda place: killed_at_random(place, mesh, random.Random(seed), kills)
    )


def check_killed(workplace, uninterrupted, mesh: str, killed: Callable[[Workplace], None]) -> Workplace:
    losses, digest = uninterrupted(mesh)
    place = workplace(SETTINGS[mesh][0])
    place.write_averaged()
    killed(place)
    place.finish(*arguments(mesh))
    assert place.losses() == losses
    assert place.digest("step-24") == digest
    assert any(path.startswith("slots.ema.") for path in digest)
    assert '"eval/ema/loss"' in (place.folder / "logs" / "run" / "metrics.jsonl").read_text()
    assert all("unfinished" not in name for name in place.checkpoints())
    return place


@pytest.mark.parametrize("mesh", ["one device", pytest.param("fsdp 8", marks=pytest.mark.soak)])
def test_killed_once(workplace, uninterrupted, mesh):
    before = time.time()
    place = check_killed(workplace, uninterrupted, mesh, lambda place: kill(place, mesh, 0.0))
    lines = read_lines(place.folder / "logs" / "run")
    goodput = account(lines)
    assert goodput is not None
    assert goodput.num_starts == 2
    ended = lines[-1]["started_unix_s"] + lines[-1]["elapsed_s"]
    assert goodput.wall_s == pytest.approx(ended - lines[0]["started_unix_s"], rel=0.005)
    # From the start of the first process to the end of the last one.
    assert before - 0.1 < lines[0]["started_unix_s"]
    assert (place.folder / "logs" / "run" / "metrics.jsonl").stat().st_mtime - 0.1 < ended < time.time() + 0.1
    assert goodput.seconds["restore"] > 0
    assert goodput.seconds["save"] > 0
    assert 0 < goodput.fraction < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=pytest.mark.soak) for name in OTHERS],
)
def test_killed_once_with_another_optimizer_or_precision(workplace, uninterrupted, setting):
    check(workplace, uninterrupted, setting, seed=3, kills=1)


LATENT = "biases behind latent attention"
ROUTERS = {
    "a loss of the router, in a hybrid": {**HYBRID, "router_aux_loss_coef": 0.1},
    "biases that move by a rule": {
        "type": "glm4_moe",
        **{"head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "shared_expert_intermediate_dim": 24},
        **{"dense_intermediate_dim": 48, "router_bias_step": 1e-3},
    },
    "sinks, and experts with biases": {
        "type": "gpt_oss",
        **{"head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "sliding_window": 8},
    },
    LATENT: {
        "type": "glm4_moe_lite",
        **{"num_experts": 4, "num_experts_per_token": 2, "shared_expert_intermediate_dim": 24},
        **{"dense_intermediate_dim": 48, "router_bias_step": 1e-3, "q_lora_rank": 12, "kv_lora_rank": 8},
        **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6},
    },
}


@pytest.mark.soak
@pytest.mark.parametrize("processes", one_of([1, 2]))
@pytest.mark.parametrize("router", one_of(ROUTERS))
def test_experts_go_on_to_the_bit(workplace, router, processes):
    """All processes kill themselves, and both start again."""
    keys = {f"--model.{key}": str(value) for key, value in ROUTERS[router].items()}
    words = ("--config_path", "run.yaml", "--trainer.num_train_steps", "12", *(w for key in keys.items() for w in key))
    whole, killed = workplace(), workplace()
    for place in (whole, killed):
        path = place.write()
        if router == LATENT:
            path.write_text(path.read_text().replace("  num_kv_heads: 2\n", ""))
    place = {"module": "tests.end_to_end.dies", "JAXLM_TEST_DIES_AT": "11"}
    assert all(end.code != 0 for end in killed.run_all(processes, *words, **place))
    for ends in (whole.run_all(processes, *words), resumed := killed.run_all(processes, *words)):
        assert [end.code for end in ends] == [0] * processes, ends
    assert re.search(r"resuming, from .*step-(5|10)$", resumed[0].out, re.MULTILINE)
    assert killed.losses() == whole.losses()
    digest = whole.digest("step-12")
    assert killed.digest("step-12") == digest
    earlier = whole.digest("step-5")
    for path in digest:
        if path.startswith("model.") and path.endswith("correction_bias"):
            assert digest[path] != earlier[path]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.soak) for m in FOUR_GROUPS])
def test_killed_once_with_four_groups(workplace, uninterrupted, mesh):
    check(workplace, uninterrupted, mesh, seed=5, kills=1)
    _, digest = uninterrupted(mesh)
    assert {path.split(".")[2] for path in digest if path.startswith("opt_state.1.")} == {
        "group_0",
        "group_1",
        "group_2",
        "rest",
    }


@pytest.mark.soak
def test_four_groups_train_the_same_on_one_and_on_eight_devices(uninterrupted):
    alone, sharded = (uninterrupted(f"four groups, {mesh}")[0] for mesh in ("one device", "fsdp 8"))
    check_close(sharded, alone)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
def test_killed_twice(workplace, uninterrupted, mesh):
    check(workplace, uninterrupted, mesh, seed=10, kills=2)


@pytest.mark.soak
def test_killed_with_tuned_options(workplace):
    """Every start compiles with the options that `jaxlm bench --tune` kept on this machine."""
    place = workplace()
    path = place.write()
    path.write_text(path.read_text().replace(f"{place.cache}/xla", "xla"))
    place.finish(*arguments("one device"), "--tune", "--steps", "6", module="tests.end_to_end.tunes_little")
    kept = place.folder / "xla" / "tuned_options.json"
    (entry,) = json.loads(kept.read_text())
    options = {"xla_cpu_prefer_vector_width": 512, "loss_chunk_tokens": 32}
    kept.write_text(json.dumps([{**entry, "options": options, "ratio": [1.1, 1.2, 1.3]}]))
    for run_id in ("whole", "killed"):
        words = (*arguments("one device"), "--trainer.id", run_id)
        if run_id == "killed":
            place.die(*words, at="second phase")
        finished = place.finish(*words)
        tuned = "xla_cpu_prefer_vector_width=512, loss_chunk_tokens=32: 1.20 times as fast as without (1.10 to 1.30)"
        assert tuned in finished.out
    assert place.losses("killed") == place.losses("whole")
    assert place.digest("step-24", "killed") == place.digest("step-24", "whole")
    kept.unlink()
    longer = place.run(*words, "--trainer.num_train_steps", "25")
    assert "XLA options: xla_cpu_prefer_vector_width=512 -> none (changes what follows: float rounding" in longer.out
    assert "block sizes: loss_chunk_tokens=32, " in longer.out


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("seed", range(100, 104))
def test_killed_five_times(workplace, uninterrupted, mesh, seed):
    check(workplace, uninterrupted, mesh, seed, kills=5)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["tp 2 x fsdp 4", "fsdp 8"])
def test_resumes_on_another_mesh(workplace, uninterrupted, mesh):
    """Started on one device and killed, finished on eight: the same batches, and the same losses within rounding."""
    losses, _ = uninterrupted("one device")
    place = workplace(1)
    place.write_averaged()
    place.die(*arguments("one device"), at="second phase")
    elsewhere = replace(place, devices=8)
    finished = elsewhere.finish(*arguments(mesh))
    assert re.search(r"resuming, from .*step-(5|10)$", finished.out, re.MULTILINE)
    check_close(place.losses(), losses)
