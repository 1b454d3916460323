"""Long documents with a pass key somewhere, which the end asks for. They teach to look far back.

Source: Mohtashami & Jaggi 2023, Landmark Attention (arXiv:2305.16300), section 4.2, with real text instead of repeated
sentences.
"""

import functools
import hashlib
import random
from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NumCharacters, NumDigits
from jaxlm.core.values.pass_key import NEEDLE, PLACE, QUESTION
from jaxlm.data.base import TRAIN, VALIDATION
from jaxlm.data.sources.source_config import CorpusConfig
from jaxlm.data.sources.stdlib import library_files
from jaxlm.data.sources.tasks.base import TaskCorpus
from jaxlm.reading.choices import choice


@choice(CorpusConfig, "pass_keys")
class PassKeyCorpus(TaskCorpus):
    """Lines of the source files of Python's standard library with a pass key between two of them, then the question of the
    evaluation `needle` and its answer. Validation documents are made of other files (`stdlib:validation`).

    Attributes:
        min_characters, max_characters: of the lines around the pass key. Each length between them is equally likely.
        digits: of a pass key.
    """

    min_characters: NumCharacters = 500
    max_characters: NumCharacters = 1500
    digits: NumDigits = 5

    def __post_init__(self):
        if self.min_characters > self.max_characters:
            raise ConfigError(
                f"min_characters: {self.min_characters} given, more than max_characters: {self.max_characters}. Give at most"
                " that"
            )

    @property
    def version(self) -> str:
        digest = hashlib.sha256()
        for split in (TRAIN, VALIDATION):
            digest.update("".join(_lines(split)).encode())
        return f"1 {digest.hexdigest()}"

    def record(self, chooser: random.Random, split: str) -> Mapping[str, Any]:
        key = "".join(chooser.choices("0123456789", k=self.digits))
        lines, size = _lines(split), chooser.randint(self.min_characters, self.max_characters)
        hay, at = [], chooser.randrange(len(lines))
        while size > 0:
            hay.append(lines[at % len(lines)][:size])
            size, at = size - len(hay[-1]), at + 1
        place = chooser.randint(0, len(hay))
        needle = NEEDLE.replace(PLACE, key)
        return {"text": f"{''.join(hay[:place])}{needle}{''.join(hay[place:])}{QUESTION} {key}."}


@functools.cache
def _lines(split: str) -> list[str]:
    files = library_files(split, "source")
    return [line for _, path in files for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
