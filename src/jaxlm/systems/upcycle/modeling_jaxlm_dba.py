"""Decoupled bottleneck attention in Llama's blocks, for transformers: `from_pretrained(folder, trust_remote_code=True)`.

A head's score is the sum of a semantic one and of a geometric one, whose pairs of features rotate by frequencies of their
own: those that `rotary_pairs` numbers.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportArgumentType=false
import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half


class DbaConfig(LlamaConfig):
    """Keys of Llama, and those of the attention.

    Attributes:
        sem_dim, geo_dim: semantic and geometric features of all query heads together.
        num_key_heads: number of key heads, which value heads share; None for as many as value heads.
        rotary_dim: the rotary embedding has the frequencies of this many features.
        rope_semantic: rotate semantic features too.
        tie_qk: semantic keys are the semantic queries.
        gate: `static`, `dynamic` or None.
        null_slot: whether each layer has a key and a value that all tokens attend to.
        output_bias: whether the output projection has a bias.
        sliding_window: number of tokens that each token attends to, including itself; None means all before it.
    """

    model_type = "jaxlm_dba"

    def __init__(
        self,
        sem_dim=0,
        geo_dim=0,
        num_key_heads=None,
        rotary_dim=None,
        rope_semantic=False,
        tie_qk=False,
        gate=None,
        null_slot=False,
        output_bias=False,
        sliding_window=None,
        **kwargs,
    ):
        self.sem_dim, self.geo_dim, self.num_key_heads, self.rotary_dim = sem_dim, geo_dim, num_key_heads, rotary_dim
        self.rope_semantic, self.tie_qk, self.gate, self.null_slot = rope_semantic, tie_qk, gate, null_slot
        self.output_bias, self.sliding_window = output_bias, sliding_window
        super().__init__(**kwargs)


def _rotary(config, size):
    """The rotary embedding for heads of this size."""
    config = copy.copy(config)
    config.head_dim = size
    return LlamaRotaryEmbedding(config)


def _rotated(x, cos, sin):
    """Args: x: [batch, heads, position, features]; cos, sin: broadcast to it."""
    return x * cos + rotate_half(x) * sin


class DbaAttention(nn.Module):
    """Attention with the weights' names of jaxlm, over a cache of keys with d_s + d_g features and of values."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        width, heads, kv_heads, bias = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.attention_bias,
        )
        self.sem_size, self.geo_size = config.sem_dim // heads, config.geo_dim // heads
        key_heads = config.num_key_heads or kv_heads
        self.group, self.key_group = heads // kv_heads, heads // key_heads
        if self.sem_size:
            self.q_sem = nn.Linear(width, heads * self.sem_size, bias=bias)
            if not config.tie_qk:
                self.k_sem = nn.Linear(width, key_heads * self.sem_size, bias=bias)
        if self.geo_size:
            self.q_geo = nn.Linear(width, heads * self.geo_size, bias=bias)
            self.k_geo = nn.Linear(width, key_heads * self.geo_size, bias=bias)
            pairs = torch.arange(self.geo_size // 2, dtype=torch.int32) % ((config.rotary_dim or self.geo_size) // 2)
            self.register_buffer("rotary_pairs", pairs.repeat(key_heads, 1))
        self.v_proj = nn.Linear(width, kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=config.output_bias)
        if config.gate is not None:
            self.gate_logits = nn.Parameter(torch.zeros(heads))
        if config.gate == "dynamic":
            self.gate_proj = nn.Linear(width, heads, bias=False)
        if config.null_slot:
            self.null_key = nn.Parameter(torch.zeros(key_heads, self.sem_size + self.geo_size))
            self.null_value = nn.Parameter(torch.zeros(kv_heads, config.head_dim))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        parts = zip(*self._parts(hidden_states, position_embeddings), strict=True)
        unrotated, q, k = (torch.cat(part, dim=-1) for part in parts)
        v = _split(self.v_proj(hidden_states), self.config.head_dim)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = k.repeat_interleave(self.key_group, dim=1), v.repeat_interleave(self.group, dim=1)
        scores = (q @ k.transpose(2, 3)).float()
        if attention_mask is None:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        elif attention_mask.dtype == torch.bool:
            allowed = attention_mask
        else:
            allowed = attention_mask >= 0
        if self.config.sliding_window is not None:
            near = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            allowed = allowed & near.triu(k.shape[2] - q.shape[2] - self.config.sliding_window + 1)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        if self.config.null_slot:
            null_key = self.null_key.repeat_interleave(self.key_group, dim=0)[None, :, :, None]
            scores = torch.cat([scores, (unrotated @ null_key).float()], dim=-1)
            null_value = self.null_value.repeat_interleave(self.group, dim=0)[None, :, None]
            v = torch.cat([v, null_value.expand(v.shape[0], -1, -1, -1)], dim=2)
        weights = torch.softmax(scores, dim=-1).to(v.dtype)
        out = (weights @ v).transpose(1, 2)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def _parts(self, x, position_embeddings):
        """The semantic and the geometric queries, without and with rotation, and keys. Factors are in the queries."""
        cos, sin, semantic_cos, semantic_sin = position_embeddings
        gate = self._gate(x)
        if self.sem_size:
            q = _split(self.q_sem(x), self.sem_size)
            k = q if self.config.tie_qk else _split(self.k_sem(x), self.sem_size)
            q = q * (2 * gate / self.sem_size**0.5)
            if self.config.rope_semantic:
                yield q, *(_rotated(a, semantic_cos[:, None], semantic_sin[:, None]) for a in (q, k))
            else:
                yield q, q, k
        if self.geo_size:
            pairs = torch.cat([self.rotary_pairs, self.rotary_pairs], dim=1).long()
            cos, sin = (a[:, :, pairs].transpose(1, 2) for a in (cos, sin))  # [batch, key head, position, features]
            q, k = _split(self.q_geo(x), self.geo_size), _split(self.k_geo(x), self.geo_size)
            q = q * ((2 - 2 * gate) / self.geo_size**0.5)
            of_queries = (a.repeat_interleave(self.key_group, dim=1) for a in (cos, sin))
            yield q, _rotated(q, *of_queries), _rotated(k, cos, sin)

    def _gate(self, x):
        if self.config.gate is None:
            return 0.5
        logits = self.gate_logits[None, None]
        if self.config.gate == "dynamic":
            logits = logits + self.gate_proj(x)
        return torch.sigmoid(logits).transpose(1, 2)[..., None]


def _split(x, size):
    """[batch, position, heads * size] as [batch, heads, position, size]."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


class _Rotaries(nn.Module):
    """Cosines and sines for geometric features, and for semantic ones if they rotate."""

    def __init__(self, config):
        super().__init__()
        heads = config.num_attention_heads
        size = config.geo_dim // heads if config.rotary_dim is None else config.rotary_dim
        self.geometric = _rotary(config, max(size, 2))
        self.semantic = _rotary(config, config.sem_dim // heads) if config.rope_semantic else None

    def forward(self, x, position_ids):
        semantic = (None, None) if self.semantic is None else self.semantic(x, position_ids)
        return *self.geometric(x, position_ids), *semantic


class DbaForCausalLM(LlamaForCausalLM):
    """Llama with `DbaAttention`."""

    config_class = DbaConfig

    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = DbaAttention(config, number)
        self.model.rotary_emb = _Rotaries(config)
        self.post_init()
