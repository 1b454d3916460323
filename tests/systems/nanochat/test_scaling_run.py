"""The command `jaxlm scaling` trains its members in processes of their own, and continues where it was killed."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
preset: {{type: depth_dial, aspect_ratio: 32, head_dim: 16, total_batch_size: 512}}
scaling: {{depths: [1, 2, 3], budgets: [1.5e+10]}}
data: {{train_urls: [{corpus}/train], validation_urls: [{corpus}/validation], cache_dir: {cache}, vocab_size: 300}}
model: {{seq_len: 32}}
optimizer: {{warmup: 2}}
trainer:
  steps_per_eval: 1000
  max_eval_batches: 2
  compilation_cache_dir: {cache}/xla
  checkpointer: {{save_interval: 1000s, keep: [{{every: 20}}]}}
"""
KILLED = "study-1.5e10-d2"


def write(place: Any) -> None:
    (place.folder / "study.yaml").write_text(CONFIG.format(corpus=place.corpus, cache=place.cache))


def wait_for(path: Path, process: Any) -> None:
    deadline = time.monotonic() + 400
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


@pytest.mark.soak
def test_a_killed_study_continues_with_the_same_results(workplace):
    place, undisturbed = workplace(), workplace()
    for each in (place, undisturbed):
        write(each)
    process = place.start("--config_path", "study.yaml", module="jaxlm.systems.nanochat.commands.scaling")
    wait_for(place.folder / "checkpoints" / KILLED / "step-20", process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    assert not (place.folder / "scaling" / "members" / f"{KILLED}.json").exists()
    again = place.finish("--config_path", "study.yaml", module="jaxlm.systems.nanochat.commands.scaling")
    finished = [line for line in again.out.splitlines() if line.endswith("| finished |")]
    assert [line.split()[1] for line in finished] == ["study-1.5e10-d1"]
    log = (place.folder / "logs" / KILLED / "train.log").read_text()
    assert "resuming" in log
    saved = json.loads((place.folder / "scaling" / "scaling.json").read_text())
    assert [member["depth"] for member in saved["members"]] == [1, 2, 3]
    assert saved["law"]["problem"] == "0 of 1 budgets have a minimum; a power law needs two" or (
        saved["law"]["problem"] == "1 of 1 budgets have a minimum; a power law needs two"
    )
    # The member's file is an ordinary configuration: trained alone, without a kill, it ends at the same loss.
    (undisturbed.folder / "alone.yaml").write_bytes(
        (place.folder / "scaling" / "members" / f"{KILLED}.yaml").read_bytes()
    )
    undisturbed.finish("--config_path", "alone.yaml")
    records = [
        json.loads(line) for line in (undisturbed.folder / "logs" / KILLED / "metrics.jsonl").read_text().splitlines()
    ]
    (last, *_) = [record["eval/bpb"] for record in reversed(records) if "eval/bpb" in record]
    assert saved["members"][1]["value"].hex() == last.hex()


@pytest.mark.soak
def test_a_signal_saves_the_member_and_ends_the_study(workplace):
    place = workplace()
    write(place)
    process = place.start("--config_path", "study.yaml", module="jaxlm.systems.nanochat.commands.scaling")
    wait_for(place.folder / "checkpoints" / "study-1.5e10-d1" / "step-20", process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 128 + signal.SIGTERM, (out, err)
    assert "study-1.5e10-d1 ended with exit code 143" in err
    assert "stopped by SIGTERM" in (place.folder / "logs" / "study-1.5e10-d1" / "train.log").read_text()


@pytest.mark.soak
def test_members_train_on_a_ray_cluster(workplace):
    place = workplace()
    write(place)
    command = ("--config_path", "study.yaml", "--scaling.depths", "[2, 3]", "--scaling.ray", "{cpus: 1}")
    place.finish(*command, module="jaxlm.systems.nanochat.commands.scaling", RAY_AUTH_MODE="disabled")
    saved = json.loads((place.folder / "scaling" / "scaling.json").read_text())
    assert sorted(member["depth"] for member in saved["members"]) == [2, 3]
    assert (place.folder / "checkpoints" / KILLED).is_dir()
