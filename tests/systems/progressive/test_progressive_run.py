"""Stacks that train one after the other: killed in and between stages, on eight devices, with a stored trunk, exported."""

import json
import re

import pytest

from tests.end_to_end.commands import Workplace, check_close

pytestmark = pytest.mark.slow
# 8 steps of each of three stacks. Checkpoints every 5 steps.
GROWN = """
preset: {{type: progressive, stacks: 3, steps_per_stack: 8, layers_per_stack: 1, {keys}}}
"""
EXPORTED = """
hf_save_path: hf
hf_save_steps: 1000
"""
# Only what a test reads is exported or evaluated.
FORMS = {
    "plain": ("carry_optimizer: true", EXPORTED),
    "stored": ("carry_optimizer: true, cache: true", "evals: []"),
    "adapted": ("at: prepend, trunk: lora, polish_steps: 2, lora: {rank: 2}", f"{EXPORTED}evals: []"),
}
MASKED = """
  masking: {mask_replicas: 2}
  tokenizer: {type: bpe, special_tokens: ["<|endoftext|>", "<|mask|>"]}
"""


def prepared(workplace, form: str, devices: int = 1) -> Workplace:
    place = workplace(devices)
    keys, more = FORMS[form]
    num_steps = 28 if form == "adapted" else 24
    text = place.write(f"{GROWN.format(keys=keys)}{more}\n", num_steps=num_steps).read_text()
    text = text.replace(f"cache_dir: {place.cache}\n", "cache_dir: cache\n")
    if form != "adapted":
        text = text.replace("  vocab_size: 300\n", f"  vocab_size: 300{MASKED}", 1) + "objective: {type: diffusion}\n"
        text = text.replace("  type: llama\n", "  type: llama\n  use_bidirectional_attention: true\n", 1)
    (place.folder / "run.yaml").write_text(text)
    return place


@pytest.fixture(scope="module")
def whole(workplace):
    """The uninterrupted run of each form: its folder, and what it logged."""
    runs = {}

    def run(form: str):
        if form not in runs:
            place = prepared(workplace, form)
            runs[form] = place, place.finish("--config_path", "run.yaml").out
        return runs[form]

    return run


def last_step(form: str) -> str:
    return "step-28" if form == "adapted" else "step-24"


def test_a_stored_trunk_gives_the_losses_of_one_that_is_computed(whole):
    (computed, _), (stored, out) = whole("plain"), whole("stored")
    check_close(stored.losses(), computed.losses(), 1e-6)
    assert len(re.findall("annotating", out)) == 2, "the trunks of the second and the third stack"
    sizes = re.findall(r"annotating (\d+) sequences .*: the steps read (\d+) of (\S+), and 0 are there", out)
    assert [numbers[:2] for numbers in sizes] == [("128", "128")] * 2, "8 steps of 16 sequences"
    assert int(sizes[0][2].replace(",", "")) > 128
    assert re.search(r"annotated [\d,]+ tokens in [\d.]+ s \([\d,]+ tokens/s\)", out)
    again = stored.stop("--config_path", "run.yaml", "--trainer.id", "again", at=9)
    assert "annotating" not in again.out, "another run of the same seed has the same trunk"
    assert "phase 'stack_1': reads" in again.out
    repeated = stored.losses("again")
    assert max(repeated) > 8, "it has trained on the stored trunk"
    assert repeated == {step: stored.losses()[step] for step in repeated}


def test_losses_fall_from_stage_to_stage(whole):
    place, _ = whole("plain")
    records = [json.loads(line) for line in (place.folder / "logs/run/metrics.jsonl").read_text().splitlines()]
    losses = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("form", "faults"),
    [
        ("stored", ["boundary", "annotating", "21"]),
        pytest.param("stored", ["3", "after surgery", "13"], marks=pytest.mark.soak),
        pytest.param("adapted", ["11", "19", "26"], marks=pytest.mark.soak),
    ],
    ids=["stored", "stored, other places", "adapted"],
)
def test_killed_runs_end_in_the_same_bits(form, faults, whole, workplace):
    uninterrupted, _ = whole(form)
    place = prepared(workplace, form)
    for fault in faults:
        place.die("--config_path", "run.yaml", at=fault)
    out = place.finish("--config_path", "run.yaml").out
    assert re.search(r"^phases\n  stack_0 .*; layers 2; .*\n(  .*\n)*  stack_2 +steps \d+ to 2\d; ", out, re.MULTILINE)
    assert place.losses() == uninterrupted.losses()
    assert place.digest(last_step(form)) == uninterrupted.digest(last_step(form))


@pytest.mark.soak
def test_eight_devices_train_the_same(whole, workplace):
    one, _ = whole("stored")
    eight = prepared(workplace, "stored", devices=8)
    eight.finish("--config_path", "run.yaml")
    check_close(eight.losses(), one.losses(), 1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("form", ["adapted", "plain"])
def test_exports_have_all_layers(form, whole):
    place, _ = whole(form)
    exported = place.folder / "hf" / last_step(form)
    assert json.loads((exported / "config.json").read_text())["num_hidden_layers"] == 4
    names = [path.name for path in (place.folder / "hf").iterdir()]
    assert last_step(form) in names
