"""What tests of preferences and rewards share."""

import pytest

from tests.data.helpers import small_tokenizer, write_records


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer(300)


@pytest.fixture
def open_with(tokenizer, tmp_path):
    """Opens records as a kind of data, given the class of its section and a function that makes its format from keys."""
    tokenizer.save(tmp_path / "tokenizer")

    def opener(kind, make_format):
        def open_records(records, seq_len=64, log=lambda _: None, **keys):
            number = len(list(tmp_path.glob("*.jsonl")))
            path = tmp_path / f"{number}.jsonl"
            write_records(path, records)
            config = kind(
                train_urls=[str(path)],
                validation_urls=[str(path)],
                cache_dir=f"{tmp_path}/cache{number}",
                tokenizer=f"{tmp_path}/tokenizer",
                format=make_format(**keys),
            )
            config.check()
            return config.open(config.corpus.load_tokenizer(lambda _: None), seq_len, log)

        return open_records

    return opener
