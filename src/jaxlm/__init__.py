"""jaxlm: one YAML trains a language model in JAX, sharded, resumable bit for bit."""

__version__ = "0.1.0"
