"""What is shown of chats and prompts before they are tokenized."""

import dataclasses
import re

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.cache import build as build_module
from jaxlm.data.formats import preview as preview_module
from jaxlm.data.formats.chat import ChatFormat
from jaxlm.data.formats.completions import SupervisedFormat
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.formats.preview import MaskPreview
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.tokens import TokensConfig
from tests.answers import TEMPLATE, write_tokenizer
from tests.data.helpers import write_records

CHATS = [
    [{"role": "user", "content": "What is\nthe capital?"}, {"role": "assistant", "content": "Paris & <b>Rome</b>"}],
    [{"role": "user", "content": "Nobody answers."}],
    [{"role": "user", "content": "a " * 40}, {"role": "assistant", "content": "much too long " * 20}],
]


@pytest.fixture
def config(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    write(tmp_path, CHATS)
    return TokensConfig(
        train_urls=[f"{tmp_path}/a.jsonl"],
        cache_dir=f"{tmp_path}/cache",
        tokenizer=f"{tmp_path}/tokenizer",
        format=ChatFormat(chat_template=TEMPLATE),
    )


def write(folder, chats):
    write_records(folder / "a.jsonl", ({"messages": m} for m in chats))


def preview_of(config: TokensConfig, seq_len: int = 64, **format_keys) -> MaskPreview:
    config = dataclasses.replace(config, format=dataclasses.replace(config.format, **format_keys))
    (source,) = config.corpus.sources
    assert isinstance(source, NamedSource)
    found = source.preview(config.corpus.load_tokenizer(lambda _: None), seq_len)
    assert found is not None
    return found


TRUNCATION_TEXT = {
    "keep_start": "lose their ends",
    "keep_end": "lose their beginnings",
    "drop_overlength": "are left out",
}


@pytest.mark.parametrize("truncation", TRUNCATION_TEXT)
def test_the_shares_are_those_of_the_sequences_that_are_trained_on(config, truncation):
    preview = preview_of(config, truncation=truncation)
    changed = dataclasses.replace(config, format=dataclasses.replace(config.format, truncation=truncation))
    sequences = changed.open(changed.corpus.load_tokenizer(lambda _: None), 64, lambda _: None).train[""]
    assert preview.num_trained == sequences.read(np.arange(len(sequences)))["loss_mask"].sum()
    assert preview.num_tokens == sequences.cache.num_tokens
    assert (preview.num_records, preview.num_empty, preview.num_overlong) == (3, 1, 1)
    assert preview.describe() == (
        f"{preview.num_trained / preview.num_tokens:.1%} of {preview.num_tokens} tokens in the first 3 records; 1 records"
        f" have none and are left out; 1 are longer than model.seq_len and {TRUNCATION_TEXT[truncation]}"
    )


def test_an_example_shows_its_mask_and_special_tokens(config):
    preview = preview_of(config)
    legend, *lines = preview.draw(colors=False).split("\n")
    assert legend.endswith("a.jsonl: line 1: the loss is computed on what is not in ⟦brackets⟧")
    drawn = "\n".join(lines)
    assert drawn == "⟦<|user|>What is\nthe capital?<|end|><|assistant|>⟧Paris & <b>Rome</b><|end|>"
    colored = preview.draw(colors=True).split("\n", 1)[1]
    green = "".join(text for codes, text in re.findall(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m", colored) if "42" in codes)
    assert green == "Paris & <b>Rome</b><|end|>"
    assert re.sub(r"\x1b\[[\d;]+m", "", colored) == re.sub("[⟦⟧]", "", drawn)
    assert "\x1b[2;1m<|user|>\x1b[0m" in colored


def test_what_is_cut_off_is_marked(config, tmp_path):
    write(tmp_path, [CHATS[2]])
    size = 110
    preview = preview_of(config, size)
    ids = config.corpus.load_tokenizer(print).encode_with_offsets([TEMPLATE_OF_LAST])[0][0].tolist()
    kept = "".join(piece.text for piece in preview.example if not piece.is_cut)
    assert kept == config.corpus.load_tokenizer(print).decode(ids[: size + 1], special=True)
    assert "; the end is beyond model.seq_len" in preview.draw(colors=False).split("\n")[0]
    assert "\x1b[9;31m" in preview.draw(colors=True)


def test_what_is_cut_off_at_the_beginning_is_struck_out(config, tmp_path):
    write(tmp_path, CHATS[2:])
    preview = preview_of(config, 20, truncation="keep_end")
    cut, kept = preview.example[0], preview.example[-1]
    assert (cut.is_cut, kept.is_cut, kept.is_trained) == (True, False, True)
    assert "".join(piece.text for piece in preview.example).endswith("much too long <|end|>")
    assert preview.num_trained == 20, "the first token that is kept is only an input"
    assert "; the beginning is beyond model.seq_len" in preview.draw(colors=False).split("\n")[0]


@pytest.mark.parametrize(("num_before", "num_after"), [(4, 1), (7, 1), (5, 0)])
def test_first_records_without_a_target_are_passed_over(config, tmp_path, monkeypatch, num_before, num_after):
    """The preview searches six records, two at a time."""
    monkeypatch.setattr(preview_module, "MAX_RECORDS", 2)
    monkeypatch.setattr(preview_module, "_MAX_BLOCKS", 3)
    monkeypatch.setattr(build_module, "_SHARD_CHARACTERS", 1)
    write(tmp_path, [CHATS[1]] * num_before + [CHATS[0]] * num_after)
    lines: list[str] = []
    tokenize = lambda: config.open(config.corpus.load_tokenizer(print), 64, lines.append)  # noqa: E731
    if not num_after:
        for read in (lambda: preview_of(config), tokenize):
            with pytest.raises(ConfigError, match=r"no assistant tokens.*first record is .*a\.jsonl: line 1$"):
                read()
        return
    preview = preview_of(config)
    if num_before < 6:
        assert (preview.num_records, preview.num_empty) == (5, 4)
        assert preview.where.endswith("line 5")
    else:
        assert preview.example == ()
        assert preview.describe().startswith("warning: none of the first 6 records has a token to compute the loss on")
        assert "none of their messages has the role 'assistant'" in preview.describe()
    assert len(tokenize().train[""]) == 1
    (warning,) = [line for line in lines if "warning" in line]
    assert warning.startswith(
        "train: warning: none of the first 1 documents has a token to compute the loss on. If the"
    )


TEMPLATE_OF_LAST = "<|user|>" + "a " * 40 + "<|end|><|assistant|>" + "much too long " * 20 + "<|end|>"


def test_text_cannot_control_the_terminal(config, tmp_path):
    write(tmp_path, [[CHATS[0][0], {"role": "assistant", "content": "a\x1b[2Jb\rc\x9bd\te"}]])
    drawn = preview_of(config).draw(colors=True)
    assert "\x1b[2J" not in drawn
    assert "a\ufffd[2Jb\ufffdc\ufffdd\te" in re.sub(r"\x1b\[[\d;]+m", "", drawn)


def test_prompts_have_a_preview_and_texts_have_none(config, tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "What?", "response": " That."}\n')
    prompts = dataclasses.replace(config, train_urls=[f"{tmp_path}/b.jsonl"], format=SupervisedFormat())
    assert preview_of(prompts).draw(colors=False).endswith("\n⟦What?⟧ That.<|endoftext|>")
    texts = dataclasses.replace(config, train_urls=[f"{tmp_path}/b.jsonl"], format=TextFormat(text_key="prompt"))
    (source,) = texts.corpus.sources
    assert source.preview(texts.corpus.load_tokenizer(print), 64) is None


@pytest.mark.parametrize(
    ("chats", "keys", "seq_len", "message"),
    [
        (
            [CHATS[1]],
            {},
            64,
            r"none of their messages has the role 'assistant'.*The first record is .*a\.jsonl: line 1$",
        ),
        ([CHATS[2]], {}, 16, r"^data: of all 1 records, none .* model\.seq_len \(16\).*a\.jsonl: line 1\. Raise"),
        ([CHATS[2]], {"truncation": "drop_overlength"}, 64, r"none has a token to compute the loss on within"),
        (CHATS, {"chat_template": "{% generation %}{% endgeneration %}x"}, 64, r"generation %\} block is empty in all"),
    ],
    ids=["no assistant", "cut off", "left out", "empty block"],
)
def test_empty_masks_are_errors_that_name_the_record(config, tmp_path, chats, keys, seq_len, message):
    write(tmp_path, chats)
    with pytest.raises(ConfigError, match=message):
        preview_of(config, seq_len, **keys)
