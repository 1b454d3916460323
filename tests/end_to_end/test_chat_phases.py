"""nanochat's stages as phases of one run: text, conversations, answers. Chatted with."""

import io
import json

import pytest

from jaxlm.commands import chat
from jaxlm.data.tokenizer.templates import NAMED, NANOCHAT_TOKENS
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from tests.end_to_end.commands import Workplace

CONFIG = """
data:
  train_urls: [{corpus}/train]
  cache_dir: {cache}-chat
  vocab_size: 400
  tokenizer: {{type: bpe, pattern: nanochat, special_tokens: {special_tokens}}}
model: {{type: llama, seq_len: 128, hidden_dim: 32, intermediate_dim: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2}}
phases:
  - {{name: base, num_train_steps: 4}}
  - name: mid
    num_train_steps: 6
    data:
      train_urls: []
      cache_dir: {cache}-chat-mid
      source: {{type: arithmetic, num_train: 60, num_validation: 10}}
      format: {{type: chat, chat_template: nanochat, mask_user_turns: false}}
  - name: sft
    num_train_steps: 10
    data:
      train_urls: []
      cache_dir: {cache}-chat-sft
      packing: {{type: best_fit, fill: pad}}
      configs:
        sums:
          source: {{type: arithmetic, num_train: 40, num_validation: 10}}
          format: {{type: chat, chat_template: nanochat}}
        words:
          source: {{type: spelling, num_train: 20, num_validation: 10}}
          format: {{type: chat, chat_template: nanochat}}
trainer:
  train_batch_size: 8
  steps_per_eval: 10
  max_eval_batches: 1
  log_dir: logs
  compilation_cache_dir: {cache}/xla
  checkpointer: {{base_path: checkpoints, save_interval: 1000s, keep: [{{every: 5}}]}}
optimizer: {{learning_rate: 1.0e-2, warmup: 2}}
"""


def start(workplace, special_tokens=NANOCHAT_TOKENS) -> Workplace:
    place = workplace()
    keys = {"corpus": place.corpus, "cache": place.cache, "special_tokens": json.dumps(list(special_tokens))}
    (place.folder / "run.yaml").write_text(CONFIG.format(**keys))
    return place


@pytest.fixture(scope="module")
def whole(workplace) -> Workplace:
    place = start(workplace)
    place.finish("--config_path", "run.yaml")
    return place


@pytest.mark.slow
def test_the_checkpoint_chats_in_its_layout_with_the_calculator(whole, monkeypatch, capsys):
    monkeypatch.chdir(whole.folder)
    tokenizer = load_tokenizer("checkpoints/run/step-20/run/tokenizer")
    assert tokenizer.chat_template == NAMED["nanochat"].text
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 12 * 7?\nNow double that.\n"))
    assert chat.main(["--checkpoint", "checkpoints/run", "--max_new_tokens", "8", "--tool", "calculator"]) == 0
    assert capsys.readouterr().err.count("tokens/s]") == 2


@pytest.mark.slow
def test_a_tokenizer_that_lacks_a_special_token_is_refused_before_the_first_phase(workplace):
    place = start(workplace, NANOCHAT_TOKENS[:-1])
    finished = place.run("--config_path", "run.yaml", "--data.cache_dir", "own")
    assert finished.code == 2
    assert "'nanochat' given, which writes <|output_end|>, but the tokenizer has no such token" in finished.err
    assert place.checkpoints() == []
