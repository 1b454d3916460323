"""Tokens and settings outside of tokenizer.json, compared with AutoTokenizer."""

import itertools
import json

import pytest
import tokenizers

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.folder_settings import REBUILT
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.data.tokens import TokensConfig
from jaxlm.interop.hf.family import all_families

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
    "GPT-2's, of Granite": {
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        "config.json": {"model_type": "granite"},
    },
    "Llama's class for bytes": {
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True}
    },
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


# --- the prefix and the decoder of SentencePiece tokenizers

STEPS = {
    "prepend": {"normalizer": tokenizers.normalizers.Prepend("\u2581")},
    "first": {"pre_tokenizer": tokenizers.pre_tokenizers.Metaspace("\u2581", "first", split=False)},
    "never": {"pre_tokenizer": tokenizers.pre_tokenizers.Metaspace("\u2581", "never", split=False)},
}
LLAMA, SPACES = "LlamaTokenizer", ["hello world", " hello", "a  b ", "<s>hello</s> world", "x<s> y", "\n<s>", "", " "]


def sentence_piece_folder(path, steps, settings, model_type):
    space, spaces = "\u2581", tokenizers.normalizers.Replace(" ", "\u2581")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), space, *"abcdehlorwxy", "he", f"{space}he"]
    merges = [("h", "e"), (space, "he")]
    model = tokenizers.models.BPE({piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>")
    model.fuse_unk = model.byte_fallback = steps != "first"  # old files lack these keys
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in pieces[:3]])
    for name, step in STEPS[steps].items():
        setattr(backend, name, step if name != "normalizer" else tokenizers.normalizers.Sequence([step, spaces]))
    parts = [tokenizers.decoders.Replace(space, " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | settings))
    return str(path)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        (LLAMA, "llama"),
        (f"{LLAMA}Fast", "smollm3"),
        ("CodeLlamaTokenizer", "llama"),
        (LLAMA, "mistral"),
        (None, "llama"),
    ],
)
@pytest.mark.parametrize("steps", STEPS)
def test_prefixes_are_those_of_transformers(name, model_type, steps, tmp_path):
    transformers = pytest.importorskip("transformers")
    for number, (prefix, legacy) in enumerate(itertools.product([None, True, False], [None, True])):
        given = {"tokenizer_class": name, "add_prefix_space": prefix, "legacy": legacy}
        (tmp_path / str(number)).mkdir()
        settings = {key: value for key, value in given.items() if value is not None}
        path = sentence_piece_folder(tmp_path / str(number), steps, settings, model_type)
        theirs, ours = transformers.AutoTokenizer.from_pretrained(path), load_tokenizer(path)
        ours.save(tmp_path / "again")
        for text, tokenizer in itertools.product(SPACES, (ours, load_tokenizer(str(tmp_path / "again")))):
            ids = tokenizer.encode_like_transformers(text, add_special_tokens=False)
            assert ids == theirs(text, add_special_tokens=False).input_ids, (given, text)
            assert tokenizer.decode(ids, special=True) == theirs.decode(ids)


def test_types_whose_class_builds_the_steps_are_those_of_transformers():
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    others = ("TokenizersBackend", "MistralCommonBackend", "GemmaTokenizer")
    families = {kind for family in all_families() for kind in family.model_types}
    assert families & set(REBUILT) == {
        kind for kind in families if auto.TOKENIZER_MAPPING_NAMES.get(kind) not in others
    }
    assert [kind for kind in REBUILT if auto.TOKENIZER_MAPPING_NAMES.get(kind) in others] == []


def test_a_token_with_another_id_is_refused(tmp_path):
    path = folder(tmp_path, {"added_tokens.json": {"<a>": 300}})
    with pytest.raises(ConfigError, match=r"'<a>' is to have the id 300, but tokenizer\.json leads to 256"):
        load_tokenizer(path)


def test_the_steps_that_a_run_has_saved_stay(tmp_path):
    """Earlier versions took the normalizer of tokenizer.json where transformers builds the class's steps."""
    from tokenizers import models, normalizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3, "a": 4, "b": 5, "\u2581a": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "<s>a b</s>a<s>b"
    saved, foreign = (load_tokenizer(str(tmp_path), of_run=of_run) for of_run in (True, False))
    as_saved = backend.encode(text, add_special_tokens=False).ids
    assert saved.encode_like_transformers(text, add_special_tokens=False) == as_saved
    assert foreign.encode_like_transformers(text, add_special_tokens=False) != as_saved


NAMED = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "a"}]


@pytest.mark.parametrize(
    ("in_settings", "num_notes"), [("b", 1), (NAMED, 1), ("a\n", 0), (None, 0)], ids=["text", "list", "same", "none"]
)
def test_the_chat_template_of_two_is_that_of_transformers(in_settings, num_notes, tmp_path):
    transformers = pytest.importorskip("transformers")
    beside = "other" if in_settings is NAMED else "a"
    path = folder(tmp_path, {"tokenizer_config.json": {**FAST, "chat_template": in_settings}})
    (tmp_path / "chat_template.jinja").write_text(beside)
    notes = []
    ours = TokensConfig(tokenizer=path).corpus.load_tokenizer(notes.append)
    assert ours.chat_template == transformers.AutoTokenizer.from_pretrained(path).chat_template == beside
    assert len(notes) == num_notes
    assert all("chat_template in tokenizer_config.json: ignored: transformers follows" in note for note in notes)
