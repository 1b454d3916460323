"""A small Hugging Face model with a tokenizer and a chat template, and instructions for fine-tuning."""

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Greece": "Athens"}


def instructions() -> list[dict[str, str]]:
    """Prompts and responses that a small model can learn."""
    return [
        {"prompt": f"What is the capital of {land}?\n", "response": f"The capital of {land} is {city}."}
        for land, city in CAPITALS.items()
    ]


def write_instructions(path: Path, copies: int = 8) -> Path:
    """The instructions as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in instructions() * copies))
    return path


def write_tokenizer(folder: Path, num_tokens: int = 320) -> int:
    """A byte-level BPE with chat tokens and a template. Returns its number of tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(r.values()) for r in instructions()], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return made.get_vocab_size(with_added_tokens=True)


def write_model(folder: Path, seed: int = 0, *, more_rows: int = 0, **options: Any) -> Path:
    """Saves a random transformers Llama beside the tokenizer. Args: more_rows: rows of the embedding without a token."""
    import torch
    import transformers

    num_tokens = write_tokenizer(folder)
    torch.manual_seed(seed)
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = transformers.LlamaConfig(
        **{**LLAMA, "initializer_range": 0.2, **options}, vocab_size=num_tokens + more_rows, **special
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
