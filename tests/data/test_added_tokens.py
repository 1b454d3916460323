"""Special tokens that are added to a tokenizer, and templates whose end of a turn ends generated text."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import AddedToken

from jaxlm.commands import convert
from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.data.tokenizer.chat_template import with_templates
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from jaxlm.data.tokens import TokensConfig
from tests.answers import write_tokenizer
from tests.data.helpers import small_tokenizer

NEW = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    return str(tmp_path)


def test_new_tokens_follow_the_others_and_are_saved(folder, tmp_path):
    before = load_tokenizer(folder)
    grown = open_tokenizer(folder, NEW, None)
    assert grown.vocab_size == before.vocab_size + 2
    assert [grown.vocabulary()[token] for token in NEW] == [before.vocab_size, before.vocab_size + 1]
    assert (grown.bos_id, grown.eos_id, grown.stop_ids) == (before.bos_id, before.eos_id, before.stop_ids)
    text = "What is <|im_end|> of the capital?"
    assert grown.encode(text) == before.encode(text), "it stays text where no template writes it"
    ids = grown.encode_with_offsets(["<|im_start|>user"])[0][0].tolist()
    assert ids == [before.vocab_size, *before.encode("user")]
    assert grown.decode(ids) == "user"
    assert grown.fingerprint != before.fingerprint
    grown.save(tmp_path / "saved")
    saved = load_tokenizer(str(tmp_path / "saved"))
    assert (saved.fingerprint, saved.vocab_size) == (grown.fingerprint, grown.vocab_size)


@pytest.mark.slow
def test_transformers_reads_the_new_tokens(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    grown = open_tokenizer(folder, NEW, None)
    for name, content in grown.files(max_length=64).items():
        (tmp_path / "export").mkdir(exist_ok=True)
        (tmp_path / "export" / name).write_bytes(content)
    theirs, ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "export"), grown.encode("user")
    text, size = "<|im_start|>user<|im_end|>", grown.vocab_size
    assert (theirs.encode(text), len(theirs)) == ([size - 2, *ids, size - 1], size)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (["<|end|>"], r"data\.added_tokens: '<\|end\|>' is a token already, with the id 4"),
        (["<a>", "<a>"], r"data\.added_tokens: '<a>' is given twice"),
        ([" <a>"], r"data\.added_tokens: ' <a>' given, a text without white space around it expected"),
        ([""], r"data\.added_tokens: '' given"),
    ],
)
def test_tokens_that_are_not_new_are_refused(folder, added, message):
    with pytest.raises(ConfigError, match=message):
        open_tokenizer(folder, added, None)


def test_added_tokens_are_part_of_the_data_section(folder, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    section = {"train_urls": [f"{tmp_path}/a.txt"], "cache_dir": f"{tmp_path}/cache"}
    plain, grown = (
        TokensConfig(tokenizer=folder, **section),
        TokensConfig(tokenizer=folder, added_tokens=NEW, **section),
    )
    size = plain.corpus.load_tokenizer(print).vocab_size
    assert grown.corpus.load_tokenizer(print).vocab_size == size + 2
    assert grown.identity() != plain.identity()
    TokensConfig(tokenizer=folder, added_tokens=NEW, vocab_size=size + 2, **section).check()
    with pytest.raises(
        ConfigError, match=rf"data\.vocab_size: {size} given, but with data\.added_tokens .* has {size + 2}"
    ):
        TokensConfig(tokenizer=folder, added_tokens=NEW, vocab_size=size, **section).check()
    with pytest.raises(
        ConfigError, match=r"data\.added_tokens: .* given together with tokenizer: bpe, which is trained"
    ):
        check_fields(TokensConfig(added_tokens=NEW, **section), "data")


def test_the_end_of_a_turn_ends_generated_text_here_and_in_transformers(folder, tmp_path):
    grown = open_tokenizer(folder, NEW, None)
    end = grown.vocabulary()["<|im_end|>"]
    chats = with_templates(grown, ["chatml"], "data.format.chat_template")
    assert (grown.stop_ids, chats.stop_ids) == ((0,), (0, end))
    chats.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).stop_ids == (0, end)
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [0, end]
    assert "_from_model_config" not in written, "transformers would read the ids of config.json instead"
    # A template without special tokens changes nothing.
    assert with_templates(grown, ["{% for m in messages %}{{ m.content }}{% endfor %}"], "key").stop_ids == (0,)


def test_adapters_alone_are_not_exported_without_the_rows_of_new_tokens(tmp_path):
    config = SimpleNamespace(initialize_from_hf="base")
    plan = SimpleNamespace(config=config, data=[SimpleNamespace(tokenizer="base", added_tokens=NEW)])
    opened = SimpleNamespace(plan=plan, location="checkpoints/run/step-1")
    with pytest.raises(ConfigError, match=r"step-1 has data\.added_tokens, and base has no rows"):
        convert._write_adapters(tmp_path, opened, None, None, verify=False)


@pytest.mark.parametrize("is_greedy", [False, True])
def test_tokens_that_swallow_white_space_are_looked_up_once(is_greedy, monkeypatch):
    base = small_tokenizer()
    base._backend.add_special_tokens([AddedToken("<|x|>", rstrip=is_greedy, normalized=False)])
    backend = Mock(wraps=base._backend)
    tokenizer, texts = Tokenizer(backend, base.bos_id, base.eos_id), ["a <|x|> b"] * 3
    searched = Mock(wraps=np.isin)
    monkeypatch.setattr(np, "isin", searched)
    for _ in range(2):
        tokenizer.encode_with_offsets(texts)
    assert backend.get_added_tokens_decoder.call_count == 1
    assert searched.call_count == (6 if is_greedy else 0)
