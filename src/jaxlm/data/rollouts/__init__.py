"""Responses that the model samples while it trains (`type: rollouts`). Importing this package registers its config."""

from jaxlm.data.rollouts.config import RolloutsConfig

__all__ = ["RolloutsConfig"]
