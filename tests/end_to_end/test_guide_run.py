"""All of Levanter's guide in one run, killed once: every tracker ends like that of an uninterrupted run."""

import json

import pytest

from tests.end_to_end.commands import Workplace
from tests.observe.tracker_files import tensorboard_events, wandb_records

STEPS = 24
FILES = {
    "run.yaml": """
data: !include data.yaml
optimizer: !include optimizer.yaml
model: {{type: llama, seq_len: 32, hidden_dim: 32, intermediate_dim: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2}}
trainer:
  num_train_steps: 24
  train_batch_size: 16
  per_device_parallelism: 4
  steps_per_eval: 9
  max_eval_batches: 2
  mp: p=f32,c=bfloat16
  fsdp_axis: embed
  tensor_parallel_axes: [mlp, heads]
  model_axis_size: 2
  tracker:
    - {{type: wandb, project: p, mode: offline, save_code: false}}
    - {{type: tensorboard, logdir: boards}}
  watch: {{include_histograms: true, interval: 4}}
  compilation_cache_dir: {cache}/xla
  checkpointer: {{save_interval: 1000s, keep: [{{every: 5, until: 10}}, {{every: 4}}]}}
""",
    "data.yaml": """
cache_dir: {cache}/guide
vocab_size: 300
configs:
  ast: {{train_urls: ["{corpus}/train/ast.py"], validation_urls: ["{corpus}/validation/bisect.py"], tags: [code, syntax]}}
  rest:
    train_urls: ["{corpus}/train/{{argparse,inspect}}.py"]
    validation_urls: ["{corpus}/validation/heapq.py"]
    tags: [code]
train_weights: [[0, {{ast: 3, rest: 1}}], [7, {{ast: 1, rest: 3}}]]
mixture_block_size: 10
""",
    "optimizer.yaml": "{{learning_rate: 1.0e-2, warmup: 2, cycles: [9, 17], rewarmup: 2, decay: 0.5, lr_schedule: linear}}",
}


def start(place: Workplace) -> dict[str, str]:
    """Writes the configuration; returns the environment variables that the processes need."""
    for name, text in FILES.items():
        (place.folder / name).write_text(text.format(cache=place.cache, corpus=place.corpus))
    private = {name: str(place.folder / name) for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    return {"WANDB_DIR": str(place.folder), "HOME": str(place.folder), **private}


def histograms(place: Workplace) -> str:
    return (place.folder / "logs" / "run" / "histograms.jsonl").read_text()


def board(place: Workplace) -> list[tuple[int, str, float]]:
    """The events that TensorBoard shows: earlier files only up to the step from which a later one resumes."""
    shown: list[tuple[int, str, float]] = []
    for path in sorted((place.folder / "boards" / "run").glob("events*"), key=lambda path: path.name):
        for event in tensorboard_events(path):
            if event.HasField("session_log"):
                shown = [entry for entry in shown if entry[0] < event.step]
            scalars = (value for value in event.summary.value if value.HasField("simple_value"))
            shown += [(event.step, value.tag, value.simple_value) for value in scalars]
    return shown


def wandb_losses(place: Workplace) -> list[list[tuple[int, float]]]:
    """(step, loss) of each process, in the order in which they were started."""
    found = []
    for path in sorted(place.folder.glob("wandb/offline-run-*/*.wandb")):  # folder names contain the start time
        rows = [{".".join(i.nested_key): i.value_json for i in r.history.item} for r in wandb_records(path)]
        found.append([(int(row["_step"]), json.loads(row["train/loss"])) for row in rows if "train/loss" in row])
    return found


@pytest.mark.slow
def test_the_whole_guide_killed_once_ends_identically(workplace):
    pytest.importorskip("wandb")
    whole, killed = workplace(4), workplace(4)
    result = whole.finish("--config_path", "run.yaml", **start(whole))
    assert not [line for line in result.out.splitlines() if line.startswith("tracker ")]  # no tracker has failed
    environment = start(killed)
    killed.die("--config_path", "run.yaml", at="second phase", **environment)  # at step 14
    killed.finish("--config_path", "run.yaml", **environment)

    assert killed.losses() == whole.losses()
    assert sorted(whole.losses()) == list(range(1, STEPS + 1))
    assert killed.digest("step-24") == whole.digest("step-24")
    assert killed.checkpoints() == whole.checkpoints()
    records = whole.numbers()
    assert killed.numbers() == records
    assert histograms(killed) == histograms(whole)
    evaluated = [record for record in records if "eval/loss" in record]
    assert [record["step"] for record in evaluated] == [9, 18, 24]
    assert {"eval/ast/loss", "eval/rest/bpb", "eval/code/loss", "eval/syntax/bpb"} <= evaluated[0].keys()
    rates = {record["step"]: record["optim/learning_rate"] for record in records if "optim/learning_rate" in record}
    assert rates[10] == rates[18] == pytest.approx(1e-3)  # where a cycle ends and the next one starts its warmup
    assert rates[12] == rates[20] == pytest.approx(1e-2)

    losses = {step: float.fromhex(loss) for step, loss in whole.losses().items()}
    for place in (whole, killed):
        shown = board(place)
        assert len(shown) == len({(step, tag) for step, tag, _ in shown})
        on_board = {step: value for step, tag, value in shown if tag == "train/loss"}
        assert on_board == {step: losses[step] for step in on_board}
        assert set(range(13, STEPS + 1)) <= on_board.keys()
        for process in wandb_losses(place):
            steps = [step for step, _ in process]
            assert steps == sorted(set(steps))
            assert dict(process) == pytest.approx({step: losses[step] for step in steps}, rel=1e-12)
    assert set(range(13, STEPS + 1)) <= dict(wandb_losses(killed)[-1]).keys()
    assert len(dict(wandb_losses(whole)[0])) == STEPS
