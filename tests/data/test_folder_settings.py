"""Tokens and settings outside of tokenizer.json, compared with AutoTokenizer."""

import json

import pytest
import tokenizers

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.tokenizer import load_tokenizer

TEXTS = ["hello <a> world<b>", " <b>x <c>y", "plain"]
A = {"content": "<a>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
B = A | {"content": "<b>", "special": False, "lstrip": True}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
FOLDERS = {
    "decoder": {"tokenizer_config.json": {**FAST, "added_tokens_decoder": {"256": A, "257": B}}},
    "decoder and list": {
        "tokenizer_config.json": {**FAST, "added_tokens_decoder": {"256": A}, "additional_special_tokens": ["<b>"]}
    },
    "list": {"tokenizer_config.json": {**FAST, "additional_special_tokens": ["<b>", "<a>"]}},
    "newer list": {"tokenizer_config.json": {**FAST, "extra_special_tokens": ["<c>"], "pad_token": "<b>"}},
    "added_tokens.json": {"tokenizer_config.json": FAST, "added_tokens.json": {"<a>": 256, "<b>": 257}},
    "GPT-2's prefix": {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
    "no prefix": {"tokenizer_config.json": {**FAST, "add_prefix_space": True}},
}


def folder(path, files):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    path = folder(tmp_path, FOLDERS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    ours = load_tokenizer(path)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode_like_transformers(text, add_special_tokens=False) == expected
        again = tmp_path / "again"
        ours.save(again)
        assert load_tokenizer(str(again)).encode_like_transformers(text, add_special_tokens=False) == expected


def test_a_token_with_another_id_is_refused(tmp_path):
    path = folder(tmp_path, {"added_tokens.json": {"<a>": 300}})
    with pytest.raises(ConfigError, match=r"'<a>' is to have the id 300, but tokenizer\.json leads to 256"):
        load_tokenizer(path)
