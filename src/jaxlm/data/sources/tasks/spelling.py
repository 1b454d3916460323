"""Conversations about the letters of words. The assistant counts letters with a call of Python's `str.count`."""

import collections
import functools
import hashlib
import os
import random
import re

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import Fraction
from jaxlm.core.safe_io import read_text
from jaxlm.data.base import TRAIN, VALIDATION
from jaxlm.data.sources.source_config import CorpusConfig
from jaxlm.data.sources.tasks.base import ConversationCorpus, Message, assistant, called, split_of, user
from jaxlm.reading.choices import choice

_ASKED = ("How do you spell {}?", "Spell the word {}.", "Which letters does {} have?")
_COUNTED = ("How many {1} are in {0}?", "How often does {1} occur in {0}?", "Count the {1} in the word {0}.")
_WORD = re.compile(r"[^\W\d_]+")
_MIN_LETTERS, _MAX_LETTERS = 3, 12
_MIN_OCCURRENCES = 2  # in the text; what occurs once is often no word


@choice(CorpusConfig, "spelling")
class SpellingCorpus(ConversationCorpus):
    """Words to spell, and letters to count in them.

    Attributes:
        words: path of a UTF-8 text: its words in lower case, of 3 to 12 letters, that occur in it twice. Null takes those of
            the reference of Python, which is on every machine.
        counts: share of the conversations that count a letter. The others spell a word.
    """

    words: str | None = None
    counts: Fraction = 0.6

    @property
    def version(self) -> str:
        words = "\n".join(word for split in (TRAIN, VALIDATION) for word in _words(self.words)[split])
        return f"1 {hashlib.sha256(words.encode()).hexdigest()}"

    def conversation(self, chooser: random.Random, split: str) -> list[Message]:
        word = chooser.choice(_words(self.words)[split])
        spelled = "-".join(word)
        if chooser.random() >= self.counts:
            return [user(chooser.choice(_ASKED).format(word)), assistant(f"{word} is spelled {spelled}.")]
        # Mostly a letter of the word, but not always.
        letter = chooser.choice(word if chooser.random() < 0.8 else "abcdefghijklmnopqrstuvwxyz")
        call, count = called(f"'{word}'.count('{letter}')")
        occurs = f"The letter {letter} occurs {count} {'time' if count == '1' else 'times'} in {word}."
        answer = assistant(f"{word} is spelled {spelled}. Python counts ", call, f"{count}. {occurs}")
        return [user(chooser.choice(_COUNTED).format(word, letter)), answer]


@functools.cache
def _words(path: str | None) -> dict[str, list[str]]:
    """Split -> its words, sorted."""
    counts = collections.Counter(_WORD.findall(_text(path)))
    words = sorted(
        word
        for word, count in counts.items()
        if word == word.lower() and _MIN_LETTERS <= len(word) <= _MAX_LETTERS and count >= _MIN_OCCURRENCES
    )
    by_split = {split: [word for word in words if split_of(word) == split] for split in (TRAIN, VALIDATION)}
    if not all(by_split.values()):
        raise ConfigError(
            f"source.words: {path or 'the reference of Python'} has {len(words)} words in lower case that have"
            f" {_MIN_LETTERS} to {_MAX_LETTERS} letters and occur at least {_MIN_OCCURRENCES} times: too few to hold some"
            " out for validation. Give a text with a few hundred of them"
        )
    return by_split


def _text(path: str | None) -> str:
    if path is not None:
        try:
            return read_text(os.path.expanduser(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"source.words: '{path}' cannot be read: {error}") from error
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            f"source.words: null given, but this Python has no reference of its language ({error}). Set it to a text"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))
