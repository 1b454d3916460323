"""Somebody's own package: an optimizer, an objective, a tracker and a program, none of which jaxlm knows."""

from acme_lm import optimizer, tracker

__all__ = ["optimizer", "tracker"]
