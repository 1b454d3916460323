"""Runs that learn what they should: to say the answers of chats and then stop, and the entropy of smoothed labels."""

import json
import math
import re

import numpy as np
import pytest

from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.session.inference_model import load
from tests.answers import write_model

FACTS = {
    "France": ("Paris", "the Seine", "French"),
    "Italy": ("Rome", "the Tiber", "Italian"),
    "Spain": ("Madrid", "the Manzanares", "Spanish"),
    "Norway": ("Oslo", "the Akerselva", "Norwegian"),
    "Greece": ("Athens", "the Kifisos", "Greek"),
    "Austria": ("Vienna", "the Danube", "German"),
    "Poland": ("Warsaw", "the Vistula", "Polish"),
    "Portugal": ("Lisbon", "the Tagus", "Portuguese"),
}
QUESTIONS = ("Which city is the capital of {}?", "Which river?", "Which language?")
CHATS = [
    [
        message
        for question, answer in zip(QUESTIONS, facts, strict=True)
        for message in (
            {"role": "user", "content": question.format(land)},
            {"role": "assistant", "content": f"{answer}."},
        )
    ]
    for land, facts in FACTS.items()
]
SFT = """
initialize_from_hf: model
use_hf_model_config: true
model: {{seq_len: 192}}
data:
  train_urls: [chats.jsonl]
  cache_dir: cache
  tokenizer: model
  added_tokens: ["<|im_start|>", "<|im_end|>"]
  format: {{type: chat, chat_template: chatml}}
objective: {{log_entropy: true}}
hf_save_path: exports
trainer:
  num_train_steps: 150
  train_batch_size: 8
  compilation_cache_dir: {cache}/xla
  checkpointer: {{base_path: checkpoints}}
optimizer: {{learning_rate: 1.0e-2, weight_decay: 0.0, warmup: 10}}
"""
NUM_LETTERS, SMOOTHING = 16, 0.1
SEQ = """
data:
  train_urls: [letters.txt]
  validation_urls: [letters.txt]
  cache_dir: cache
  tokenizer: letters.json
  enforce_bos: false
  enforce_eos: false
model: {{type: llama, seq_len: 16, hidden_dim: 64, intermediate_dim: 64, num_layers: 2, num_heads: 2, num_kv_heads: 2}}
objective: {{type: next_token, label_smoothing: {smoothing}}}
trainer:
  num_train_steps: 150
  train_batch_size: 16
  steps_per_eval: 150
  compilation_cache_dir: {cache}/xla
  checkpointer: {{base_path: checkpoints}}
optimizer: {{learning_rate: 1.0e-2, weight_decay: 0.0, warmup: 5, min_lr_ratio: 0.0}}
"""


def records_of(place, run_id="run"):
    path = place.folder / "logs" / run_id / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def spoken(workplace):
    """A run on chats from a random model, and its export."""
    pytest.importorskip("transformers")
    place = workplace()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    write_model(place.folder / "model", **sizes, initializer_range=0.05)
    (place.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in CHATS))
    (place.folder / "run.yaml").write_text(SFT.format(cache=place.cache))
    done = place.finish("--config_path", "run.yaml")
    return place, done.out


@pytest.mark.slow
def test_the_model_memorizes_the_answers_and_ends_them(spoken):
    place, out = spoken
    assert "the 2 rows for data.added_tokens are the mean of the 320 others" in out
    assert re.search(r"accuracy [\d.]+  trained \d\d%", out)
    last = [record for record in records_of(place) if "train/loss" in record][-1]
    assert last["train/loss"] < 0.05
    assert last["train/mean_token_accuracy"] > 0.99
    assert 0 <= last["train/entropy"] < 0.2
    assert 0.1 < last["train/trained_share"] < 0.6

    export = place.folder / "exports" / "step-150"
    model = load(str(export))
    tokenizer = model.tokenizer
    end = tokenizer.vocabulary()["<|im_end|>"]
    assert tokenizer.stop_ids == (0, end)
    template = ChatTemplate.load(None, tokenizer, "here")
    encode = lambda text: tokenizer.encode_with_offsets([text])[0][0].tolist()  # noqa: E731
    prompts = [encode(template.prompt(chat[:turn], "here")) for chat in CHATS for turn in (1, 3, 5)]
    answers = [chat[turn]["content"] for chat in CHATS for turn in (1, 3, 5)]
    assert model.generate(prompts, max_new_tokens=24, temperature=0.0) == answers

    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export)
    for number in range(0, len(prompts), 4):  # of each turn of some chats
        prompt, answer = prompts[number], answers[number]
        said = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        assert said[len(prompt) :] == [*encode(answer), end]

    # Nothing is learned from the questions: the words that no answer contains stay unlikely.
    asked = [encode(f"{template.prompt(chat[:1], 'here')}") for chat in CHATS]
    header = len(encode("<|im_start|>user\n"))
    nats = [-scores[header - 1 : header + 4].mean() for scores in model.log_probs(asked)]
    assert np.mean(nats) > 1


@pytest.mark.soak
def test_smoothed_labels_are_learned_to_their_entropy_and_evaluated_without(workplace):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    place = workplace()
    letters = "abcdefghijklmnop"
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(place.folder / "letters.json"))
    (place.folder / "letters.txt").write_text(letters * 64)
    (place.folder / "run.yaml").write_text(SEQ.format(cache=place.cache, smoothing=SMOOTHING))
    place.finish("--config_path", "run.yaml")
    other = SMOOTHING / NUM_LETTERS
    target = 1 - SMOOTHING + other
    floor = -target * math.log(target) - (NUM_LETTERS - 1) * other * math.log(other)
    assert floor == pytest.approx(0.565009, abs=1e-6)
    records = records_of(place)
    objective = [record["train/objective"] for record in records if "train/objective" in record]
    assert floor - 1e-5 < min(objective)
    assert objective[-1] == pytest.approx(floor, abs=2e-3)
    evaluated = [record["eval/loss"] for record in records if "eval/loss" in record][-1]
    assert evaluated == pytest.approx(-math.log(target), abs=0.01), "far below what is minimized"
