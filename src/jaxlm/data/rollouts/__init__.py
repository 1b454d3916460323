"""Responses that the model samples while it trains (`type: rollouts`). Importing this package registers its config."""

from jaxlm.data.rollouts.rollouts_config import RolloutsConfig

__all__ = ["RolloutsConfig"]
