import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.errors import ConfigError
from jaxlm.data.config import DataConfig
from jaxlm.data.tokenizer import tokenizer as tokenizer_module
from jaxlm.data.tokenizer import train_bpe as bpe_module
from jaxlm.data.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer
from jaxlm.data.tokenizer.train_bpe import PATTERNS, BpeConfig, _first_characters, train_bpe
from jaxlm.data.tokens import TokensConfig
from jaxlm.plan.load_config import decode_run
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.data.helpers import small_tokenizer, some_text

GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2_tokenizer"

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
code_like = st.lists(
    st.sampled_from(["def ", "x", "\n", "    ", "\t", " ", "\r\n", "é", "12", "_", "((", "'s"]), max_size=40
)


@pytest.fixture(scope="module")
def small():
    return small_tokenizer()


@settings(max_examples=60)
@given(text=any_text | code_like.map("".join))
def test_any_text_round_trips_byte_for_byte(small, text):
    [ids] = small.encode_batch([text])
    assert small.decode(ids) == text
    assert small.token_bytes()[ids].sum() == len(text.encode())


def test_special_tokens_in_text_are_encoded_as_text(small):
    text = f"a{END_OF_TEXT}b"
    [ids] = small.encode_batch([text])
    assert small.eos_id not in ids
    assert small.decode(ids) == text
    assert small.decode([small.bos_id, *ids, small.eos_id]) == text


def test_token_bytes_of_single_bytes_and_of_the_end_of_text(small):
    counts = small.token_bytes()
    assert counts.dtype == np.int32
    assert counts.shape == (small.vocab_size,)
    assert counts[small.eos_id] == 0
    assert (counts == 0).sum() == 1
    assert (counts == 1).sum() == 256


@pytest.mark.slow
def test_training_is_deterministic_across_processes():
    program = "from tests.data.helpers import small_tokenizer; print(small_tokenizer().fingerprint)"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == small_tokenizer().fingerprint


def test_the_vocabulary_is_limited_by_the_text():
    assert train_bpe(["ab ab ab"], 1000).vocab_size < 270
    assert small_tokenizer(300).vocab_size == 300


NANOCHAT_TOKENS = [f"<|{name}|>" for name in ("bos", "user_start", "user_end", "assistant_start", "assistant_end")]
NANOCHAT_TOKENS += [f"<|{name}|>" for name in ("python_start", "python_end", "output_start", "output_end")]
NANOCHAT = BpeConfig(pattern="nanochat", special_tokens=NANOCHAT_TOKENS, max_document_characters=10_000)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("nanochat", ["I", "'ve", " paid", " ", "12", "34", "5", ".", "67", "  ", " x", "\n\n", "\tdef"]),
        ("gpt4", ["I", "'ve", " paid", " ", "123", "45", ".", "67", "  ", " x", "\n\n", "\tdef"]),
        ("code", ["I", "'ve", " paid", " ", "123", "45", ".", "67", "  ", " x", "\n\n\t", "def"]),
        (r"\w+|\W", ["I", "'", "ve", " ", "paid", " ", "12345", ".", "67", *"   x\n\n\t", "def"]),
    ],
)
def test_patterns_cut_text_into_pieces(pattern, expected):
    text = "I've paid 12345.67   x\n\n\tdef"
    assert "".join(expected) == text
    config = dataclasses.replace(NANOCHAT, pattern=pattern)
    backend = train_bpe([text], 256 + len(NANOCHAT_TOKENS), config)._backend
    assert [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == expected


@given(text=st.text("aB é名²٣12345 \t\n\r'sSvVeE._(€़🙂\u00a0", max_size=60))
@settings(max_examples=100)
def test_the_pattern_of_nanochat_agrees_with_its_possessive_form(text):
    """Its own pattern never gives back what `?` and `+` have matched. The library `regex` runs it as written."""
    import tokenizers
    from tokenizers import pre_tokenizers

    regex = pytest.importorskip("regex")
    words = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    possessive = words + r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS["nanochat"]), behavior="isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == regex.findall(possessive, text)


@pytest.fixture(scope="module")
def nanochat():
    return train_bpe([some_text(seed) for seed in range(20)], 320, NANOCHAT)


def test_special_tokens_have_the_last_ids_and_no_bytes(nanochat, tmp_path):
    assert nanochat.vocab_size == 320
    vocabulary = nanochat.vocabulary()
    assert [vocabulary[token] for token in NANOCHAT_TOKENS] == list(range(311, 320))
    assert (nanochat.bos_id, nanochat.eos_id, nanochat.stop_ids) == (311, 311, (311,))
    counts = nanochat.token_bytes()
    assert counts[311:].tolist() == [0] * 9
    assert (counts[:311] == 0).sum() == 0
    assert (counts == 1).sum() == 256
    text = "größe 名前 🙂<|bos|>1999"  # tokens may end inside a character: bytes are counted, not characters
    ids = nanochat.encode(text)
    assert max(ids) < 311
    assert nanochat.decode(ids) == text
    assert counts[ids].sum() == len(text.encode())
    nanochat.save(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.fingerprint == nanochat.fingerprint
    np.testing.assert_array_equal(loaded.token_bytes(), counts)
    assert loaded.encode_like_transformers("<|user_start|>a", add_special_tokens=False) == [312, *nanochat.encode("a")]


def test_a_special_token_that_is_a_token_of_the_text_is_refused():
    config = dataclasses.replace(NANOCHAT, special_tokens=["<|bos|>", "a"])
    with pytest.raises(ConfigError, match=r"special_tokens: 'a' given, which is a token of the text too\. Give one"):
        train_bpe(["some text"], 300, config)


def trained(folder: Path, **options: object) -> tuple[Tokenizer, list[str]]:
    lines: list[str] = []
    config = TokensConfig(
        train_urls=[f"{folder}/text"],
        cache_dir=f"{folder}/cache-{'-'.join(options) or 'plain'}",
        tokenizer=BpeConfig(**options),
        vocab_size=300,
    )
    config.check()
    return config.corpus.load_tokenizer(lines.append), lines


def test_a_tokenizer_is_trained_on_what_the_options_leave(tmp_path):
    (tmp_path / "text").mkdir()
    for number, word in enumerate(("abcab ", "xyzxy ")):
        (tmp_path / "text" / f"{number}.txt").write_text(word * 20 + "qrqrqr " * 200)
    merged = {
        name: {token for token in trained(tmp_path, **options)[0].vocabulary() if len(token) > 1}
        for name, options in {
            "all": {},
            "beginnings": {"max_document_characters": 120},
            "first": {"max_characters": 120, "max_document_characters": 120},
        }.items()
    }
    has = {
        name: [any(part in token for token in tokens) for part in ("ab", "xy", "qr")] for name, tokens in merged.items()
    }
    assert has == {"all": [True] * 3, "beginnings": [True, True, False], "first": [True, False, False]}
    assert "only on the first 120 characters" in " ".join(
        trained(tmp_path, max_characters=120, max_document_characters=120, pattern="gpt4")[1]
    )


def test_other_options_are_another_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text(some_text(3))
    usual = TokensConfig(train_urls=[f"{tmp_path}/text.txt"], cache_dir=f"{tmp_path}/cache", vocab_size=270)
    usual.corpus.load_tokenizer(print)
    explicit = dataclasses.replace(usual, tokenizer=BpeConfig())
    assert explicit.corpus.load_tokenizer(print).fingerprint == usual.corpus.load_tokenizer(print).fingerprint
    assert explicit.identity() == usual.identity()
    for options in ({"pattern": "gpt4"}, {"special_tokens": ["<|bos|>"]}, {"max_characters": 9}):
        other = dataclasses.replace(usual, tokenizer=BpeConfig(**options))
        assert other.identity() != usual.identity()
        (name,) = options
        with pytest.raises(
            ConfigError, match=rf"the tokenizer .* was built from other inputs:\n  {name}: was None, is now"
        ):
            other.corpus.load_tokenizer(print)


@pytest.mark.parametrize(
    ("options", "vocab_size", "message"),
    [
        ({"special_tokens": []}, 300, r"data\.tokenizer\.special_tokens: \[\] given, one or more different"),
        ({"special_tokens": ["<a>", "<a>"]}, 300, r"special_tokens: \['<a>', '<a>'\] given, one or more different"),
        (
            {"special_tokens": ["<a>", "<b>"]},
            257,
            r"vocab_size: 257 given, at least 258 expected: .*and 2 special tokens",
        ),
        ({}, 256, r"vocab_size: 256 given, at least 257 expected: .* one for the end of text"),
        (
            {"pattern": "gtp4"},
            300,
            r"data\.tokenizer\.pattern: 'gtp4' given, code, gpt4, nanochat or a regular expression",
        ),
        (
            {"special_tokens": ["<|bos|>", "<|\ud800|>"]},
            300,
            r"data\.tokenizer\.special_tokens: '<\|\\ud800\|>' given, which has half of a surrogate pair",
        ),
        ({"pattern": "(a"}, 300, r"data\.tokenizer\.pattern: '\(a' is not a regular expression"),
    ],
)
def test_invalid_options_are_refused_before_training(tmp_path, options, vocab_size, message):
    (tmp_path / "text.txt").write_text("text")
    config = TokensConfig([f"{tmp_path}/text.txt"], tokenizer=BpeConfig(**options), vocab_size=vocab_size)
    with pytest.raises(ConfigError, match=message):
        config.check()


def test_a_pattern_that_takes_too_many_steps_is_one_message():
    pattern, text = r"(?:a|aa)+c|\S", "a" * 60 + "bc"
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.pattern: .* gives up on a text"):
        train_bpe([text], 300, BpeConfig(pattern=pattern))
    trained = train_bpe(["aac"], 260, BpeConfig(pattern=pattern))
    with pytest.raises(ConfigError, match=r"data\.tokenizer: the regular expression .* gives up on a text"):
        trained.encode(text)


def test_the_section_is_read_from_yaml():
    tree = {"tokenizer": {"type": "bpe", "pattern": "nanochat", "max_characters": 1000}}
    assert decode(DataConfig, ConfigSource(tree)).tokenizer == BpeConfig(pattern="nanochat", max_characters=1000)
    assert decode(DataConfig, ConfigSource({"tokenizer": "bpe"})).tokenizer == "bpe"
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.max_characters: 0 given, an integer of 1 or more"):
        decode_run(ConfigSource({"data": {"tokenizer": {"max_characters": 0}}}), "run")


def test_long_texts_are_read_in_pieces_that_end_at_white_space(monkeypatch):
    monkeypatch.setattr(bpe_module, "_MAX_PIECE", 10)
    text = "some words and averyverylongwordwithoutspace\nend"
    pieces = list(_first_characters([text, "short"], 1000, print))
    assert "".join(pieces) == text + "short"
    assert max(map(len, pieces)) <= 10
    assert pieces[:2] == ["some", " words"]


def test_only_the_first_characters_train_the_tokenizer(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(bpe_module, "_REPORT_EVERY_S", 0.0)
    assert list(_first_characters(["ab", "cd", "ef"], 4, said.append)) == ["ab", "cd"]
    assert said == [
        "training the tokenizer: 2 characters read, at most 4",
        "the tokenizer is trained only on the first 4 characters of the text",
    ]


def test_save_and_load(small, tmp_path):
    small.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(path))
        assert loaded.fingerprint == small.fingerprint
        assert (loaded.bos_id, loaded.eos_id) == (small.bos_id, small.eos_id)
        assert loaded.encode_batch([some_text(5)]) == small.encode_batch([some_text(5)])


def saved_with(small: Tokenizer, folder: Path, **settings: object) -> Path:
    """The small tokenizer with two more special tokens and other settings."""
    small.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    for name in ("<begin>", "</s>"):
        number = 1 + max(token["id"] for token in content["added_tokens"] + [{"id": small.vocab_size - 1}])
        content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").unlink()
    for name, setting in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(setting))
    return folder


@pytest.mark.parametrize(
    ("settings", "bos", "eos"),
    [
        ({"tokenizer_config": {"bos_token": "<begin>", "eos_token": {"content": "</s>"}}}, 320, 321),
        ({"tokenizer_config": {"bos_token": None, "eos_token": "</s>"}}, None, 321),
        ({"config": {"bos_token_id": 320, "eos_token_id": [321, 0]}}, 320, 321),
        ({"tokenizer_config": {"eos_token": "<begin>"}, "config": {"bos_token_id": 321, "eos_token_id": 0}}, 321, 320),
        ({}, 0, 0),  # <|endoftext|>
    ],
)
def test_special_tokens_are_found_in_the_settings(small, tmp_path, settings, bos, eos):
    loaded = load_tokenizer(str(saved_with(small, tmp_path, **settings)))
    assert (loaded.bos_id, loaded.eos_id) == (bos, eos)
    assert loaded.vocab_size == 322
    assert loaded.token_bytes()[[0, 320, 321]].tolist() == [0, 0, 0]


def test_the_fingerprint_depends_on_the_special_tokens(small, tmp_path):
    before = load_tokenizer(str(saved_with(small, tmp_path))).fingerprint
    after = load_tokenizer(str(saved_with(small, tmp_path, config={"eos_token_id": 321}))).fingerprint
    assert before != after


NO_MERGES = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
UNREADABLE = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # the library panics


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no tokenizer\.json found .*or 'bpe' to train one"),
        ("{", r"is not JSON"),
        ('{"version": 1}', r"is not a tokenizer: it has no \"model\""),
        (json.dumps({"model": NO_MERGES, "normalizer": UNREADABLE}), r"is not a tokenizer: .*precompiled_charsmap"),
    ],
)
def test_invalid_tokenizers_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"data\.tokenizer: .*{message}"):
        load_tokenizer(str(tmp_path))


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = {"<unk>": 0, "a": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 64}},
            r"its normalizer can make a text 1\.8e\+19 ti",
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "Sequence", "normalizers": [DOUBLED] * 8}] * 8,
                }
            },
            r"its normalizer can make a text 1\.8e\+19 times as long, at most 1,000",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [DOUBLED | {"pattern": {"Regex": "(?=a)"}}] * 64}},
            "its normalizer can",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 64}}, "its pre_tokenizer can make a text"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLED] * 64}}, "its decoder can make a text"),
        (
            {"model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": WORDS | {"b": 2_000_000_000}}},
            r"has a token with the id 2,000,000,000, below 16,777,216 expected",
        ),
        (
            {"model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "a": 1, "b": 2, "c": 1}}},
            r"has the tokens 'a' and 'c' with the same id 1\.",
        ),
        ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLED | {"content": "e"}] * 64}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "\\s+|x*"}, "content": " "}}, None),
    ],
)
def test_a_tokenizer_without_a_bound_is_refused(tmp_path, change, message):
    usual = {"version": "1.0", "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": WORDS}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(usual | change))
    if message is None:
        load_tokenizer(str(tmp_path)).encode("a b")
        return
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_special_token_that_does_not_exist(small, tmp_path):
    with pytest.raises(ConfigError, match=r"eos_token in tokenizer_config\.json is '<stop>', which is not a token of"):
        load_tokenizer(str(saved_with(small, tmp_path, tokenizer_config={"eos_token": "<stop>"})))


def sentencepiece_like() -> Tokenizer:
    """Word starts are marked, and unknown characters fall back to bytes, as in Llama 2."""
    import tokenizers
    from tokenizers import models

    texts = ["\u2581", "a", "b", "\u2581a", "\u2581\u2581"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts]
    numbers, merges = {word: number for number, word in enumerate(words)}, [("\u2581", "a"), ("\u2581", "\u2581")]
    model = models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, 1, 2)


@settings(max_examples=50)
@given(text=st.text("ab é🙂\n", max_size=30))
def test_token_bytes_of_a_sentencepiece_vocabulary(text):
    tokenizer = sentencepiece_like()
    [ids] = tokenizer.encode_batch([text])
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_bytes_of_unknown_vocabularies_are_not_guessed():
    import tokenizers
    from tokenizers import models

    words = Tokenizer(
        tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")), None, None
    )
    with pytest.raises(ConfigError, match=r"neither byte-level nor SentencePiece .*WordPiece"):
        words.token_bytes()


class TestLongTexts:
    """Long texts are split before tokenization, which must not change the ids."""

    pieces = st.lists(
        st.sampled_from(["a", "9", "\n", "\n\n", " ", "\r\n", "'s", "é", "़", "²", "(", "_"]), max_size=120
    )

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch):
        monkeypatch.setattr(tokenizer_module, "_LONG_TEXT", 20)
        monkeypatch.setattr(tokenizer_module, "_CHARACTERS_PER_CALL", 50)

    @staticmethod
    def agree(tokenizer: Tokenizer, text: str) -> int:
        whole = tokenizer._backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_batch([text, "a", text])[0] == whole
        assert tokenizer.encode_batch([text, "a", text])[2] == whole
        return len(tokenizer._split_long_text(text))

    @settings(max_examples=60)
    @given(text=pieces)
    def test_splitting_gives_the_same_ids(self, small, text):
        self.agree(small, "".join(text))

    @pytest.mark.slow
    @settings(max_examples=50)
    @given(text=pieces)
    @pytest.mark.skipif(not GPT2.exists(), reason="needs GPT-2's tokenizer")
    def test_splitting_gives_the_same_ids_with_gpt2(self, gpt2, text):
        self.agree(gpt2, "".join(text))

    @pytest.fixture(scope="class")
    def gpt2(self):
        return load_tokenizer(str(GPT2))

    def test_splits_long_texts(self, small):
        assert self.agree(small, "abc def\nghi " * 30) > 10
        assert self.agree(small, "no line here " * 30) == 1

    def test_never_splits_for_unknown_tokenizers(self):
        assert self.agree(sentencepiece_like(), "ab\nab" * 30) == 1

    @pytest.mark.parametrize(
        ("pattern", "normalizer", "cuts"),
        [(r"\n", None, True), (r"\s?\w+", None, False), (r"\w+\n?", None, False), (r"\n", "prepend", False)],
    )
    def test_splits_only_at_isolated_newlines(self, pattern, normalizer, cuts):
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers, trainers

        backend = tokenizers.Tokenizer(models.BPE())
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
        if normalizer:
            backend.normalizer = normalizers.Prepend("x")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(["ab\nab\ncab " * 50], trainer=trainer)
        assert (self.agree(Tokenizer(backend, None, None), "ab\nab\ncab " * 30) > 1) == cuts


@pytest.mark.slow
@pytest.mark.skipif(not GPT2.exists(), reason="needs GPT-2's tokenizer")
def test_gpt2_agrees_with_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(GPT2))
    ours = load_tokenizer(str(GPT2))
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (50257, theirs.bos_token_id, theirs.eos_token_id)
    texts = [some_text(seed) for seed in range(10)]
    assert ours.encode_batch(texts) == [theirs(text)["input_ids"] for text in texts]
    counts = ours.token_bytes()
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert counts[ids].sum() == len(text.encode())


@pytest.mark.parametrize("settings", [{}, *({"add_bos_token": b, "add_eos_token": e} for b in (0, 1) for e in (0, 1))])
@pytest.mark.parametrize("template", [None, ["<begin>", "$A"], ["$A", "</s>"]])
def test_special_tokens_are_added_as_in_transformers(small, settings, template, tmp_path):
    """By the post-processor in tokenizer.json, whatever the settings say."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    names = {"bos_token": "<begin>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    chosen = {key: bool(value) for key, value in settings.items()}
    folder = saved_with(small, tmp_path, tokenizer_config=names | chosen)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if template is not None:
        numbers = [(name, backend.token_to_id(name)) for name in ("<begin>", "</s>")]
        backend.post_processor = TemplateProcessing(single=template, special_tokens=numbers)
    backend.save(str(folder / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)("some text")["input_ids"]
    assert load_tokenizer(str(folder)).encode_like_transformers("some text", add_special_tokens=True) == theirs


def test_a_folders_token_ids_and_generation_settings_are_saved(small, tmp_path):
    generation = {"eos_token_id": [0, 7], "pad_token_id": 3, "temperature": 0.6, "top_p": 0.95}
    model = {"eos_token_id": [7, 9], "pad_token_id": 3, "hidden_size": 12}
    folder = saved_with(small, tmp_path / "a", generation_config=generation, config=model)
    loaded = load_tokenizer(str(folder))
    assert loaded.stop_ids == (0, 7, 9)
    assert loaded.eos_id == 7
    loaded.save(tmp_path / "b")
    again = load_tokenizer(str(tmp_path / "b"))
    assert (again.stop_ids, again.special_ids) == (loaded.stop_ids, loaded.special_ids)
    assert again.special_ids == {"bos_token_id": 0, "eos_token_id": [7, 9], "pad_token_id": 3}
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == generation
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*generation_config\.json"):
        load_tokenizer(str(folder))
