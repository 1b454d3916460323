"""What documents begin with: BOS, or what a Hugging Face tokenizer itself puts in front of a text, as TRL does."""

import dataclasses
import json

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.data.formats.chat import ChatFormat
from jaxlm.data.formats.completions import PairsFormat, SupervisedFormat
from jaxlm.data.formats.documents import TextFormat
from jaxlm.data.several_completions import PairsConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.evals.batches import prompt_ids
from tests.answers import write_tokenizer

RECORD = {
    "text": "Paris is a city.",
    "prompt": "What is the capital of France?",
    "response": " Paris",
    "chosen": " Paris",
    "rejected": " Rome",
}
MESSAGES = [{"role": "user", "content": "France?"}, {"role": "assistant", "content": "Paris"}]
# How config.json or the tokenizer's files name BOS -> what transformers puts in front of a text.
NAMED = ("config.json", "tokenizer_config.json", "post-processor", "ignored add_bos_token")


@pytest.fixture
def folder(tmp_path):
    """Writes the tokenizer of a Hugging Face folder. Returns its path."""

    def write(named: str) -> str:
        import tokenizers
        from tokenizers.processors import TemplateProcessing

        write_tokenizer(tmp_path / "model")
        settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
        if named == "config.json":  # as transformers 5 saves Qwen2
            del settings["bos_token"]
            (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", "bos_token_id": 0}))
        if named == "ignored add_bos_token":  # transformers 5 reads the post-processor alone
            settings["add_bos_token"] = True
        if named == "post-processor":
            backend = tokenizers.Tokenizer.from_file(f"{tmp_path}/model/tokenizer.json")
            special = [("<|endoftext|>", 0)]
            backend.post_processor = TemplateProcessing(single=["<|endoftext|>", "$A"], special_tokens=special)
            backend.save(f"{tmp_path}/model/tokenizer.json")
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
        return str(tmp_path / "model")

    return write


@pytest.fixture
def section(tmp_path):
    """A data section on one record."""
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD | {"messages": MESSAGES}) + "\n")
    usual = {"train_urls": [f"{tmp_path}/a.jsonl"], "cache_dir": f"{tmp_path}/cache"}

    def make(kind, record_format, tokenizer, **keys):
        return kind(format=record_format, tokenizer=tokenizer, **usual | keys)

    return make


def cached(config):
    """The tokens of the training data."""
    tokenizer = config.corpus.load_tokenizer(lambda _: None)
    (source,) = config.corpus.sources
    return source.open_cache("train", tokenizer, lambda _: None).tokens.tolist()


@pytest.mark.parametrize("named", NAMED)
def test_prompts_begin_as_in_transformers_and_trl(named, folder, section):
    """TRL tokenizes `prompt` and `prompt + completion + EOS` with the tokenizer's own special tokens."""

    def kinds(prompt, whole):
        yield TokensConfig, SupervisedFormat(), whole["response"]
        yield PairsConfig, PairsFormat(), whole["chosen"] + whole["rejected"]

    check_beginning(named, folder, section, kinds)


def check_beginning(named, folder, section, kinds):
    """Compares with transformers.

    Args:
        kinds: of the tokens of a prompt, and of whole texts: kinds of data, their formats, and the tokens that they have.
    """
    transformers = pytest.importorskip("transformers")
    path = folder(named)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    whole = {
        key: theirs(RECORD["prompt"] + RECORD[key])["input_ids"] + [0] for key in ("response", "chosen", "rejected")
    }
    prompt = theirs(RECORD["prompt"])["input_ids"]
    assert (prompt[0] == 0) is (named == "post-processor")
    for kind, record_format, expected in kinds(prompt, whole):
        config = section(kind, record_format, path)
        assert cached(dataclasses.replace(config, cache_dir=f"{config.cache_dir}/{kind.__name__}")) == expected
        tokenizer = config.corpus.load_tokenizer(lambda _: None)
        assert prompt_ids(tokenizer, RECORD["prompt"], bos=config.corpus.prompt_bos) == prompt, (
            "as samples of the run begin"
        )
        begins = "BOS" if named == "post-processor" else "no BOS"
        assert config.corpus.describe_begin() == (
            f"documents begin with {begins}, as the tokenizer itself begins a text (data.enforce_bos is null)"
        )


def test_plain_text_explicit_keys_and_our_own_tokenizers_keep_bos(folder, section, tmp_path):
    path = folder("config.json")
    text = section(TokensConfig, TextFormat(), path)
    assert cached(text)[0] == 0
    assert text.corpus.prompt_bos is True
    assert "as plain text does without data.enforce_bos" in text.corpus.describe_begin()
    written = section(TokensConfig, SupervisedFormat(), path, enforce_bos=True, cache_dir=f"{tmp_path}/written")
    assert cached(written)[0] == 0
    assert written.corpus.describe_begin() == "documents begin with BOS (data.enforce_bos: true)"
    ours = section(TokensConfig, SupervisedFormat(), "bpe", vocab_size=270, cache_dir=f"{tmp_path}/ours")
    tokenizer = ours.corpus.load_tokenizer(lambda _: None)
    assert cached(ours)[0] == tokenizer.bos_id
    again = dataclasses.replace(ours, tokenizer=f"{tmp_path}/ours/tokenizer", vocab_size=None)
    assert cached(again)[0] == tokenizer.bos_id, "a tokenizer that was trained here says nothing about BOS"
    assert prompt_ids(tokenizer, "a", bos=again.corpus.prompt_bos)[0] == tokenizer.bos_id
    chat = section(TokensConfig, ChatFormat(), path, cache_dir=f"{tmp_path}/chat")
    assert cached(chat)[0] != 0, "the template writes no BOS"
    assert chat.corpus.describe_begin() == "documents begin as the chat template writes them"


def test_a_mixture_says_it_by_source(folder, section, tmp_path):
    path = folder("config.json")
    source = {"train_urls": [f"{tmp_path}/a.jsonl"]}
    from jaxlm.data.sources.source_config import SourceConfig

    formats = {"plain": TextFormat(), "asked": SupervisedFormat()}
    configs = {name: SourceConfig(format=each, **source) for name, each in formats.items()}
    config = TokensConfig(configs=configs, tokenizer=path, cache_dir=f"{tmp_path}/mixed")
    assert config.corpus.describe_begin().startswith("documents of plain begin with BOS (as plain text does")
    assert "documents of asked begin with no BOS, as the tokenizer itself" in config.corpus.describe_begin()
    assert config.identity()["enforce_bos"] == {"plain": True, "asked": False}


def test_a_cache_that_was_tokenized_the_other_way_is_not_reused(folder, section):
    config = section(TokensConfig, SupervisedFormat(), folder("config.json"))
    assert cached(config)[0] != 0
    with_bos = dataclasses.replace(config, enforce_bos=True)
    with pytest.raises(ConfigError, match=r"enforce_bos: was False, is now True"):
        cached(with_bos)
    assert (config.identity()["enforce_bos"], with_bos.identity()["enforce_bos"]) == (False, True)


def test_a_prefix_of_other_tokens_is_put_in_front_too(folder, section, tmp_path):
    """As ChatGLM's, whose prefix is not BOS."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    path = folder("config.json")
    backend = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
    special = [("<|system|>", 3), ("<|user|>", 1), ("<|end|>", 4)]
    single = ["<|system|>", "<|user|>", "$A", "<|end|>"]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=special)
    backend.save(f"{path}/tokenizer.json")
    config = section(TokensConfig, SupervisedFormat(), path)
    np.testing.assert_array_equal(cached(config)[:2], [3, 1])
    assert config.identity()["enforce_bos"] == [3, 1]
    assert "begin with <|system|><|user|>, as the tokenizer itself" in config.corpus.describe_begin()
