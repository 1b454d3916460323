"""Token caches and tokenizers that machines share at a URL. The store is fsspec's memory file system."""

import fsspec
import numpy as np
import pytest

from jaxlm.config.decode import decode
from jaxlm.config.yaml import ConfigSource
from jaxlm.core.errors import ConfigError
from jaxlm.data.cache.cache_store import CacheStore
from jaxlm.data.tokens import TokensConfig

URL = "memory://shared/cache"


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/shared", recursive=True)


def section(text, **keys) -> TokensConfig:
    return decode(TokensConfig, ConfigSource({"train_urls": [str(text)], "cache_dir": URL, "vocab_size": 300, **keys}))


def machine(folder, monkeypatch):
    """Makes a folder the working folder, as of another machine that has nothing yet."""
    folder.mkdir()
    monkeypatch.chdir(folder)


def opened(data: TokensConfig) -> tuple[np.ndarray, list[str]]:
    """All tokens, and the lines that were logged."""
    lines: list[str] = []
    tokenizer = data.load_tokenizer(lines.append)
    examples = data.open(tokenizer, 16, lines.append).train[""]
    return examples.read(np.arange(len(examples)))["tokens"], lines


def test_the_first_machine_builds_and_the_second_copies(tmp_path, monkeypatch, memory):
    text = tmp_path / "text.txt"
    text.write_text("a text of words " * 500)
    machine(tmp_path / "one", monkeypatch)
    built, said = opened(section(text))
    assert any("training a BPE tokenizer" in line for line in said)
    assert memory.exists("/shared/cache/train/cache.json")
    assert memory.exists("/shared/cache/tokenizer/made_from.json")
    again, said = opened(section(text))
    assert not any("sharing" in line or "copying" in line for line in said)
    machine(tmp_path / "two", monkeypatch)
    copied, said = opened(section(text))
    np.testing.assert_array_equal(copied, built)
    np.testing.assert_array_equal(again, built)
    assert sum("copying" in line for line in said) == 2  # the tokenizer and the tokens
    assert not any("training a BPE" in line for line in said)


def test_an_interrupted_upload_is_not_a_cache(tmp_path, monkeypatch, memory):
    text = tmp_path / "text.txt"
    text.write_text("a text of words " * 500)
    machine(tmp_path / "one", monkeypatch)
    built, _ = opened(section(text))
    memory.rm_file("/shared/cache/train/cache.json")  # it is uploaded last
    machine(tmp_path / "two", monkeypatch)
    rebuilt, _ = opened(section(text))
    np.testing.assert_array_equal(rebuilt, built)
    assert memory.exists("/shared/cache/train/cache.json")


def test_a_shared_cache_of_another_text_is_refused(tmp_path, monkeypatch, memory):
    text = tmp_path / "text.txt"
    text.write_text("a text of words " * 500)
    machine(tmp_path / "one", monkeypatch)
    opened(section(text))
    machine(tmp_path / "two", monkeypatch)
    text.write_text("another text " * 500)
    with pytest.raises(ConfigError, match=r"data\.cache_dir"):
        opened(section(text))


def test_a_source_can_have_a_url_of_its_own(tmp_path, monkeypatch, memory):
    text = tmp_path / "text.txt"
    text.write_text("a text of words " * 500)
    machine(tmp_path / "one", monkeypatch)
    data = decode(
        TokensConfig,
        ConfigSource({"cache_dir": "local", "configs": {"a": {"train_urls": [str(text)], "cache_dir": f"{URL}/a"}}}),
    )
    data.open(data.load_tokenizer(print), 16, print)
    assert memory.exists("/shared/cache/a/train/cache.json")
    assert (tmp_path / "one" / "local" / "tokenizer").is_dir()


def test_an_unknown_protocol_is_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match=r"data\.cache_dir: 'nowhere://x': fsspec does not support nowhere://"):
        CacheStore.at("nowhere://x", "data.cache_dir").check()
