"""`data.shuffle`, where it is more than yes or no."""

from dataclasses import dataclass
from typing import Literal

from jaxlm.core.errors import ConfigError


@dataclass(frozen=True)
class EraShuffle:
    """Windows shuffled within stretches of equal length, which follow each other as the data stands.

    Attributes:
        type: `era`.
        era_length: windows in a stretch.
    """

    era_length: int
    type: Literal["era"] = "era"

    def __post_init__(self):
        if self.era_length < 1:
            raise ConfigError(f"data.shuffle.era_length: {self.era_length} given, 1 or more windows expected")


Shuffle = bool | EraShuffle
