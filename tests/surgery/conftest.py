"""The model tests' small models and inputs."""

from tests.models.conftest import as_inputs, built, logits_of

__all__ = ["as_inputs", "built", "logits_of"]
