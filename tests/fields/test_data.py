"""The effect of each field of `data` on the batches, the tokenizer and the folders."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.tokens import TokensConfig
from tests.fields.proofs import assert_test_exists, outcome_of
from tests.fields.trees import tree

HUB, MIXTURE = "tests/data/test_hugging_face.py::TestKeys::", "tests/data/test_mixture.py::test_mixture_fields"
LIMITS = "tests/data/test_limits.py::"
SHOWN_ELSEWHERE = {
    "id": HUB + "test_a_folder_of_splits",
    "name": HUB + "test_invalid_sections_are_refused",
    "split": HUB + "test_a_folder_of_splits",
    "validation_split": HUB + "test_a_folder_of_splits",
    "stream": HUB + "test_streamed_rows_equal_loaded_rows",
    "source": "tests/data/test_corpus.py::test_records_are_used_like_those_of_a_file",
    "num_validation_files": "tests/data/test_best_fit.py::test_files_held_out_are_neither_trained_on_nor_listed_twice",
    "packing": "tests/data/test_best_fit.py::test_agrees_with_searching_a_list",
    "added_tokens": "tests/data/test_added_tokens.py::test_new_tokens_follow_the_others_and_are_saved",
    "masking": "tests/data/test_masking.py::test_hidden_tokens_are_the_mask_token_and_nothing_else_changes",
    "stride": "tests/data/test_windows.py::test_each_sequence_begins_a_stride_after_the_one_before",
    "train_overlap": "tests/data/test_windows.py::test_without_the_overlap_every_token_is_a_target_once",
    "format": "tests/data/test_segments.py::test_every_format_has_a_row_and_every_option_a_test",
    "ignore_token_id": LIMITS + "test_ignored_tokens_are_no_targets_in_training_and_validation",
    "cache_mirror_gb": "tests/data/test_cache_store.py::test_the_mirror_has_a_limit",
    "max_train_batches": LIMITS + "test_training_repeats_the_first_batches_of_a_source",
    "num_validation_sequences": LIMITS + "test_the_last_sequences_are_held_out_of_training_and_evaluated",
    **dict.fromkeys(("tags", "configs", "train_weights", "stop_strategy", "mixture_block_size"), MIXTURE),
}


@dataclass(frozen=True)
class Opened:
    """The data that a section opens.

    Attributes:
        tokenizer: the section's tokenizer.
        ids: int [rows, positions], the tokens of the first batch.
        segments: int [rows, positions], their segment ids.
        num_validation: number of validation sets.
        folders: the folders that were created.
    """

    tokenizer: Any
    ids: np.ndarray
    segments: np.ndarray
    num_validation: int
    folders: list[str]

    @property
    def text(self) -> str:
        """All rows, decoded one after another."""
        return self.tokenizer.decode(self.ids.ravel().tolist())

    @property
    def ends(self) -> set[bool]:
        """Whether documents end with the tokenizer's EOS token if another one follows in the same row."""
        return set((self.ids[:, :-1][self._boundaries] == self.tokenizer.eos_id).tolist())

    @property
    def begins(self) -> set[bool]:
        """Whether documents begin with the tokenizer's BOS token if another one ends in the same row."""
        return set((self.ids[:, 1:][self._boundaries] == self.tokenizer.bos_id).tolist())

    @property
    def _boundaries(self) -> np.ndarray:
        before, after = self.segments[:, :-1], self.segments[:, 1:]
        return (before != after) & (before > 0) & (after > 0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    records = [f'{{"text": "some text {i}", "other": "what {i}"}}\n' for i in range(99)]
    (folder / "a.jsonl").write_text("".join(records))
    (folder / "b.txt").write_text("entirely different words " * 40)
    other = TokensConfig(train_urls=[f"{folder}/b.txt"], cache_dir=f"{folder}/cache", vocab_size=270)
    other.corpus.load_tokenizer(log=lambda _: None).save(folder / "saved")
    return folder


@pytest.fixture
def opened(corpus, tmp_path):
    """Opens the section with these fields and reads its first batch."""

    def open_section(**fields: Any) -> Opened:
        usual = {"train_urls": [f"{corpus}/a.jsonl"], "cache_dir": f"{tmp_path}/cache", "vocab_size": 280}
        config = TokensConfig(**usual | fields)
        tokenizer = config.corpus.load_tokenizer(log=lambda _: None)
        data = config.open(tokenizer, 16, log=lambda _: None)
        eight = BatchSchedule.of([BatchSize(0, 8)])
        batches = data.batches(eight, outcome_of(tree()).plan.layout, start=0, first_step=0, seed=0)
        batch = next(batches)
        batches.close()
        ids, segments = (np.asarray(column.array)[0] for column in (batch.tokens, batch.segment_ids))
        return Opened(tokenizer, ids, segments, len(data.validation), sorted(path.name for path in tmp_path.iterdir()))

    return open_section


# Field -> (another value, a property of the first batch that holds only with that value).
FIELDS: dict[str, tuple[Any, Callable[[Opened], bool]]] = {
    "train_urls": (["{corpus}/b.txt"], lambda data: "entirely different" in data.text),
    "validation_urls": (["{corpus}/b.txt"], lambda data: data.num_validation == 1),
    "cache_dir": ("{cache}-other", lambda data: data.folders == ["cache-other"]),
    "tokenizer": ("{corpus}/saved", lambda data: data.tokenizer.vocab_size == 270),
    "vocab_size": (300, lambda data: data.tokenizer.vocab_size == 300),
    "text_key": ("other", lambda data: "what" in data.text and "some" not in data.text),
    "shuffle": (False, lambda data: "text 0some text 1some text 2" in data.text),
    "enforce_bos": (False, lambda data: data.begins == {False}),
    "enforce_eos": (False, lambda data: data.ends == {False}),
}


def test_every_field_of_the_data_section_is_listed():
    assert {field.name for field in dataclasses.fields(TokensConfig)} == {*FIELDS, *SHOWN_ELSEWHERE}


@pytest.mark.parametrize("name", FIELDS)
def test_data_field(opened, corpus, tmp_path, name):
    value, holds = FIELDS[name]
    places = {"corpus": corpus, "cache": tmp_path / "cache"}
    if isinstance(value, list):
        value = [text.format(**places) for text in value]
    elif isinstance(value, str):
        value = value.format(**places)
    usual = {"vocab_size": None} if name == "tokenizer" else {}
    assert holds(opened(**usual, **{name: value}))
    (tmp_path / "cache-usual").mkdir()
    assert not holds(opened(cache_dir=str(tmp_path / "cache-usual")))


@pytest.mark.parametrize("test", sorted(set(SHOWN_ELSEWHERE.values())))
def test_tests_named_for_data_fields_exist(test):
    assert_test_exists(test)
