"""A third-party package: a data source, a model, an optimizer, an objective, a tracker and a program."""

from acme_lm import corpus, optimizer, tracker

__all__ = ["corpus", "optimizer", "tracker"]
