"""A masked-diffusion run, first as a whole and then as blocks: on two processes, evaluated, exported, and sampled."""

import json
import re

import pytest

from jaxlm.commands import convert, evaluate, sample
from tests.end_to_end.commands import Finished, Workplace, check_close

SECTIONS = """
objective: {type: diffusion}
phases:
  - {name: whole, num_train_steps: 12}
  - {name: blocks, num_train_steps: 12, objective: {type: diffusion_blocks, num_blocks: 2}}
evals: [{type: loss}, {type: samples, prompts: ["def "], max_new_tokens: 6, denoising: {num_steps: 3}}]
"""
DATA = """
  masking: {validation_replicas: 2}
  tokenizer: {type: bpe, special_tokens: ["<|endoftext|>", "<|mask|>"]}
"""


STACKS = """
objective: {type: mlm}
preset: {type: progressive, stacks: 2, steps_per_stack: 8, layers_per_stack: 1, at: prepend, depth_times: {}}
evals: [{type: samples, prompts: ["def "], max_new_tokens: 12, denoising: {schedule: depth}}]
"""


def start(workplace, sections: str = SECTIONS, num_steps: int = 24) -> Workplace:
    place = workplace(1)
    path = place.write(sections, num_steps=num_steps)
    text = path.read_text().replace("  vocab_size: 300\n", f"  vocab_size: 300{DATA}", 1)
    text = text.replace(f"cache_dir: {place.cache}\n", f"cache_dir: {place.cache}-masked\n", 1)
    path.write_text(text.replace("  type: llama\n", "  type: llama\n  use_bidirectional_attention: true\n", 1))
    return place


@pytest.fixture(scope="module")
def whole(workplace):
    """The uninterrupted run, and what it logged."""
    place = start(workplace)
    return place, place.finish("--config_path", "run.yaml").out


def evaluated(place: Workplace) -> dict[str, float]:
    (record,) = [record for record in place.records() if record["step"] == 24 and "eval/loss" in record]
    return {name: record[name] for name in ("eval/loss", "eval/bpb")}


@pytest.mark.soak
def test_two_processes_hide_the_same_tokens(whole, workplace):
    uninterrupted, _ = whole
    place = start(workplace)
    results = place.run_all(2, "--config_path", "run.yaml")
    assert [result.code for result in results] == [0, 0], results
    check_close(place.losses(), uninterrupted.losses(), rel=1e-4)


@pytest.mark.slow
def test_commands_read_a_masked_diffusion_model(whole, in_process):
    place, said = whole
    assert "  | def " in said
    options = ("--prompt", "def ", "--max_new_tokens", "8", "--temperature", "0")
    loss = _loss(in_process(evaluate.main, place, "--checkpoint", "checkpoints/run", "--max_batches", "2"))
    assert loss == pytest.approx(evaluated(place)["eval/loss"], rel=1e-5)
    by_block = in_process(sample.main, place, "--checkpoint", "checkpoints/run", *options, "--schedule", "depth")
    assert by_block.code == 0, by_block.err
    assert "mask" not in by_block.out
    refused = in_process(convert.main, place, "to-hf", "--checkpoint", "checkpoints/run", "--output_dir", "none")
    assert (refused.code, "this model is 2 blocks of layers" in refused.err) == (2, True)

    checkpoint = ("--checkpoint", "checkpoints/run/step-10")
    loss = _loss(in_process(evaluate.main, place, *checkpoint, "--max_batches", "2"))
    converted = in_process(convert.main, place, "to-hf", *checkpoint, "--output_dir", "hf", "--verify", "true")
    assert converted.code == 0, converted.err
    assert json.loads((place.folder / "hf/config.json").read_text())["is_causal"] is False
    assert json.loads((place.folder / "hf/tokenizer_config.json").read_text())["mask_token"] == "<|mask|>"
    data = ("--data.validation_urls", f"[{place.corpus}/validation]", "--model.seq_len", "32", "--batch_size", "16")
    masking = ("--data.masking", "{validation_replicas: 2}")
    again = in_process(evaluate.main, place, "--checkpoint", "hf", "--max_batches", "2", *data, *masking)
    assert _loss(again) == pytest.approx(loss, rel=1e-4)
    refused = in_process(evaluate.main, place, "--checkpoint", "hf", "--tasks", "arc_easy")
    assert refused.code == 2
    assert "it makes no predictions of next tokens, which tasks read" in refused.err
    names = ("checkpoints/run/step-10", "hf")
    texts = [in_process(sample.main, place, "--checkpoint", name, *options, "--num_steps", "4") for name in names]
    assert [text.code for text in texts] == [0, 0], [text.err for text in texts]
    assert texts[0].out == texts[1].out
    assert "mask" not in texts[0].out


@pytest.mark.soak
def test_stacks_with_noise_of_their_own_generate_one_after_the_other(workplace, in_process):
    place = start(workplace, STACKS, num_steps=16)
    path = place.folder / "run.yaml"
    path.write_text(path.read_text().replace("validation_replicas: 2", "min_mask_fraction: 0.3"))
    out = place.finish("--config_path", "run.yaml").out
    assert re.search(r"parts of stack_1 .* layers 1 to 2 for 0 to 0\.3, layers 0 to 2 for 0\.3 to 1 of the tokens", out)
    shares = {
        record["step"]: record["train/hidden_share"] for record in place.records() if "train/hidden_share" in record
    }
    assert shares[8] == pytest.approx(0.3, abs=0.08)
    assert (shares[9], shares[16]) == (1.0, 1.0)
    options = ("--prompt", "def ", "--max_new_tokens", "8", "--schedule", "depth")
    text = in_process(sample.main, place, "--checkpoint", "checkpoints/run", *options)
    assert text.code == 0, text.err
    assert "mask" not in text.out


def _loss(finished: Finished) -> float:
    assert finished.code == 0, finished.err
    return json.loads(finished.out.splitlines()[-1])["loss"]
