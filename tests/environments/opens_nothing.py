"""An environment of one's own with a mistake."""

from dataclasses import dataclass

from jaxlm.environments.base import EnvironmentConfig


@dataclass(frozen=True)
class OpensNothingConfig(EnvironmentConfig):
    """Forgets to return its environment."""

    def open(self):
        return None
