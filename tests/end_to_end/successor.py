"""A task for reinforcement learning: after `d =`, say the digit that follows d, modulo 8, and stop."""

import json
from pathlib import Path

TOKENS = ["<eos>", *"01234567", "Ġ", "=", "?", "!", "x", "y", "z"]  # Ġ is a space
EOS, DIGITS = 0, 8
FIRST = TOKENS.index("0")


def right(completion_ids, digit):
    """0.8 if the first token is the next digit, and 0.2 more if EOS follows it."""
    return [
        0.8 * is_next + 0.2 * (is_next and list(ids[1:2]) == [EOS])
        for ids, d in zip(completion_ids, digit, strict=True)
        for is_next in [bool(ids) and ids[0] == FIRST + (d + 1) % DIGITS]
    ]


def wrong(completion_ids, digit):
    """The negative of `right`."""
    return [-reward for reward in right(completion_ids, digit)]


_calls: list[int] = []


def fails_in_the_third_call(completion_ids, digit):
    """`right`, until a third call while there is a file `fails`."""
    _calls.append(1)
    if len(_calls) == 3 and Path("fails").exists():
        raise ValueError("cannot go on")
    return right(completion_ids, digit)


def prompt_ids(digit: int) -> list[int]:
    """`d =`, after the token that begins a document."""
    return [EOS, FIRST + digit, TOKENS.index("Ġ"), TOKENS.index("=")]


def write_task(folder: Path) -> None:
    """A tokenizer of characters, and four records for each digit."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(TOKENS)}, unk_token="?"))
    by_character = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([by_character, by_byte])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    (folder / "tokenizer").mkdir()
    backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<eos>", "eos_token": "<eos>"})
    )
    records = [{"prompt": f"{digit} =", "digit": digit} for digit in range(DIGITS)] * 4
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
