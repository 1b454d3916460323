"""The model tests' small models and inputs."""

from tests.models.conftest import as_inputs, built

__all__ = ["as_inputs", "built"]
