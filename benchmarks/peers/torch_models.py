"""Plain PyTorch implementations of GPT-2 and Llama."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. `family` is gpt2 or llama. `mlp` is the width of the feed-forward network."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    seq_len: int
    vocab: int
    tied: bool

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, biased = shape, shape.family == "gpt2"
        self.widths = [n * shape.head_size for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self.qkv = nn.Linear(shape.hidden, sum(self.widths), bias=biased)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=biased)

    def forward(self, x, rotation):
        rows, length, _ = x.shape
        heads = (a.view(rows, length, -1, self.shape.head_size) for a in self.qkv(x).split(self.widths, 2))
        q, k, v = (a.transpose(1, 2) for a in heads)
        if rotation is not None:
            q, k = rotated(q, *rotation), rotated(k, *rotation)
        grouped = self.shape.kv_heads != self.shape.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class GeluMlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.up, self.down = nn.Linear(shape.hidden, shape.mlp), nn.Linear(shape.mlp, shape.hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGlu(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.hidden, shape.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.norm1, self.norm2, self.attention = norm(shape), norm(shape), Attention(shape)
        self.mlp = GeluMlp(shape) if shape.family == "gpt2" else SwiGlu(shape)

    def forward(self, x, rotation):
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder that maps tokens and targets to the mean loss."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq_len, shape.hidden) if shape.family == "gpt2" else None
        self.blocks, self.norm = nn.ModuleList(Block(shape) for _ in range(shape.layers)), norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        self.rotation = None if shape.family == "gpt2" else cosine_and_sine(shape)
        self.apply(initialized)

    def to(self, device):  # the rotation is not a parameter
        if self.rotation is not None:
            self.rotation = tuple(a.to(device) for a in self.rotation)
        return super().to(device)

    def forward(self, inputs, targets):
        x = self.tokens(inputs)
        if self.positions is not None:
            x = x + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x, self.rotation)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, self.shape.vocab).float(), targets.reshape(-1))


def norm(shape):
    return nn.LayerNorm(shape.hidden) if shape.family == "gpt2" else nn.RMSNorm(shape.hidden, eps=1e-5)


def initialized(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def cosine_and_sine(shape, theta=10000.0):
    frequency = theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
    angle = torch.outer(torch.arange(shape.seq_len), torch.cat([frequency, frequency]))
    return angle.cos(), angle.sin()


def rotated(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return (x * cosine + torch.cat([-second, first], -1) * sine).to(x.dtype)


def optimizer_of(model, *, learning_rate, betas, epsilon, weight_decay):
    """AdamW with weight decay on matrices except the embeddings."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "tokens" not in n and "positions" not in n]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
