"""A run whose phases read longer and longer sequences: killed in and between phases, on eight devices, exported."""

import json
import re

import jax
import numpy as np
import pytest

from jaxlm.commands import evaluate, prepare
from jaxlm.core.errors import ConfigError
from jaxlm.plan.load_config import load_config
from jaxlm.plan.plan import make_plan
from tests.end_to_end.commands import Workplace, check_close
from tests.end_to_end.fork_server import PLOTS

NEEDLE = r'type: needle, lengths: [64, 128, 256], depths: [0.0, 1.0], digits: 2, needle: "\n{key}\n", question: "\n"'
EXTENDED = (
    f"""
evals:
  - {{type: loss}}
  - {{{NEEDLE}, num_samples: 2, every: 1}}
"""
    """
hf_save_path: hf
hf_save_steps: 1000
phases:
  - name: short
    num_train_steps: 8
    train_batch_size: 16
  - name: longer
    num_train_steps: 8
    train_batch_size: 8
    surgery: [{type: extend_context, seq_len: 64, rope: {type: yarn}}]
    carry_optimizer: true
  - name: longest
    num_train_steps: 8
    train_batch_size: 4
    per_device_parallelism: 2
    surgery: [{type: extend_context, seq_len: 128, rope: {type: yarn}}]
    data:
      configs:
        code: {train_urls: [CORPUS/train], validation_urls: [CORPUS/validation]}
        keys: {source: {type: pass_keys, num_train: 64, num_validation: 0, min_characters: 20, max_characters: 40}}
      train_weights: {code: 0.8, keys: 0.2}
"""
)
NEEDLES = "needles.yaml"
CELLS = [f"needle/{n}{cell}" for n in (64, 128, 256) for cell in ("", "/depth_0", "/depth_1")]
METRICS = [*CELLS, "needle/accuracy"]


def prepared(workplace, devices: int = 1) -> Workplace:
    place = workplace(devices)
    path = place.write(EXTENDED.replace("CORPUS", str(place.corpus)))
    text = path.read_text().replace("  train_batch_size: 16\n", "", 1)
    # Other tests share a tokenizer that was built from sources without a name.
    text = text.replace(f"  cache_dir: {place.cache}\n", f"  cache_dir: {place.cache}/extended\n", 1)
    # The sources of the last phase replace the one of the others.
    ours = re.search(r"  train_urls: .*\n  validation_urls: .*\n", text)[0]
    path.write_text(text.replace(ours, f"  configs: {{code: {{{', '.join(ours.split(chr(10))[:2]).strip()}}}}}\n", 1))
    return place


@pytest.fixture(scope="module")
def whole(workplace):
    """The uninterrupted run, and what it logged."""
    place = prepared(workplace)
    return place, place.finish("--config_path", "run.yaml", **{PLOTS: "1"}).out


def records(place: Workplace, name: str) -> dict[int, float]:
    lines = map(json.loads, (place.folder / "logs/run/metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.mark.soak
def test_a_step_keeps_its_tokens_and_totals_add_them_up(whole):
    place, out = whole
    rows = "16 x 32 = 512 tokens per step.*from step 8: 8 x 64 = 512 tokens.*from step 16: 4 x 128 = 512 tokens"
    assert re.search(rows, out)
    assert "12,288 tokens in total over 24 steps" in out
    totals = records(place, "throughput/total_tokens")
    assert totals == {step: 512 * step for step in range(1, 25)}


@pytest.mark.slow
def test_short_documents_are_packed_into_long_rows(whole, in_process):
    place, _ = whole
    shown = in_process(prepare.main, place, "--config_path", "run.yaml", "--show_batch", "17")
    assert "step 18, phase 'longest', 4 rows of 128 tokens" in shown.out
    _, *rows = re.split(r"^=== row ", shown.out, flags=re.MULTILINE)
    of_keys = [row.count("--- document ") for row in rows if " of keys, loss on 127 of 128 tokens" in row]
    assert min(of_keys) > 1, "the first token of the second document is no target"


@pytest.mark.soak
def test_every_length_is_measured_in_every_phase(whole):
    place, _ = whole
    for length in (64, 128, 256):
        found = records(place, f"eval/needle/{length}")
        assert set(found) == {8, 9, 16, 18, 24}
        cells = [records(place, f"eval/needle/{length}/depth_{depth}") for depth in (0, 1)]
        assert all(found[step] == np.mean([cell[step] for cell in cells]) for step in found)
    assert (place.folder / "logs/run/needle.png").exists()
    assert "needle, longest, step 24" in (place.folder / "logs/run/report.html").read_text()


@pytest.mark.soak  # a position in rows of another length than those before
def test_killed_runs_end_in_the_same_bits(whole, workplace):
    uninterrupted, _ = whole
    place = prepared(workplace)
    for fault in ("3", "boundary", "after surgery", "11", "21"):
        place.die("--config_path", "run.yaml", at=fault)
    place.finish("--config_path", "run.yaml")
    assert place.losses() == uninterrupted.losses()
    assert place.digest("step-24") == uninterrupted.digest("step-24")
    for name in ("eval/loss", "eval/needle/accuracy", "throughput/total_tokens"):
        assert records(place, name) == records(uninterrupted, name)


@pytest.mark.soak
def test_eight_devices_train_and_find_the_same(whole, workplace):
    one, _ = whole
    eight = prepared(workplace, devices=8)
    path = eight.folder / "run.yaml"
    path.write_text(path.read_text().replace("    per_device_parallelism: 2\n", ""))
    eight.finish("--config_path", "run.yaml", "--trainer.allow_nondivisible_batch_size", "true")
    check_close(eight.losses(), one.losses(), 1e-5)
    assert records(eight, "eval/needle/accuracy") == records(one, "eval/needle/accuracy")


@pytest.mark.slow
def test_exports_are_as_long_and_find_as_many(whole, in_process):
    place, _ = whole
    config = json.loads((place.folder / "hf/step-24/config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert config["rope_scaling"] | {"original_max_position_embeddings": 32, "factor": 4.0} == config["rope_scaling"]
    (place.folder / NEEDLES).write_text(f"evals: [{{{NEEDLE}, num_samples: 2}}]\n")
    trained = {name: value[24] for name in METRICS for value in [records(place, f"eval/{name}")]}
    measured = {}
    held_out = ("--data.validation_urls", f"[{place.corpus}/validation]")
    for checkpoint, more in (("checkpoints/run", ()), ("hf/step-24", held_out)):
        evaluated = in_process(evaluate.main, place, "--checkpoint", checkpoint, "--gates", NEEDLES, *more)
        assert evaluated.code == 0, evaluated.err
        measured[checkpoint] = json.loads(evaluated.out.splitlines()[-1])["metrics"]
    assert measured["checkpoints/run"] == trained
    assert measured["hf/step-24"].keys() == trained.keys(), "without BOS, which this tokenizer does not add by itself"


def test_the_plan_has_the_batches_of_each_phase(workplace, monkeypatch):
    place = prepared(workplace)
    monkeypatch.chdir(place.folder)
    plan = make_plan(load_config(["--config_path", "run.yaml"], "jaxlm train"), "x", 300, jax.devices()[:1])
    stages = [plan.batches.of(phase).at(phase.start) for phase in plan.phases]
    assert [(stage.size, stage.num_microbatches) for stage in stages] == [(16, 1), (8, 1), (4, 2)]
    assert [plan.batches.eval_of(phase) for phase in plan.phases] == [16, 8, 2]
    assert plan.data[2].train_weights == {"code": 0.8, "keys": 0.2}
    with pytest.raises(
        ConfigError, match=r"trainer\.train_batch_size: 8 given, but it has no effect, because every phase"
    ):
        make_plan(
            load_config(["--config_path", "run.yaml", "--trainer.train_batch_size", "8"], "jaxlm train"), "x", 300
        )
