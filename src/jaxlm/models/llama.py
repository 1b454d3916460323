"""Llama: rotary positions, grouped queries, RMSNorm, SwiGLU, no biases.

Source: Touvron et al. 2023 (arXiv:2302.13971 and arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from dataclasses import dataclass

from jaxlm.models.base import ModelConfig
from jaxlm.models.pre_norm import UniformConfig


@ModelConfig.register_subclass("llama")
@dataclass(frozen=True)
class LlamaConfig(UniformConfig):
    """Llama's sizes; the defaults are Llama 2 7B at half its context."""
