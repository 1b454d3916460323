"""Somebody's own package: a data source, an optimizer, an objective, a tracker and a program, none of which jaxlm knows."""

from acme_lm import corpus, optimizer, tracker

__all__ = ["corpus", "optimizer", "tracker"]
