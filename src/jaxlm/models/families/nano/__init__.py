"""nanochat's model (`type: nano`). Importing this package registers its config."""

from jaxlm.models.families.nano.model import NanoConfig

__all__ = ["NanoConfig"]
