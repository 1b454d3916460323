"""nanochat's model in torch, written from its formulas, with the names and shapes of its own checkpoints."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from jaxlm.models.rope import DefaultRotary
from jaxlm.systems.nanochat.lookup import LookupConfig
from jaxlm.systems.nanochat.model import NanoConfig


@dataclass(frozen=True)
class Reference:
    """A model's sizes, and the numbers in which the two revisions differ. `short`: how far back an S layer attends."""

    num_layers: int = 4
    width: int = 64
    heads: int = 2
    kv_heads: int = 2
    vocab: int = 64
    length: int = 16
    pattern: str = "SSSL"
    short: int = 8
    base: float = 10_000.0
    rounds_rope: bool = True
    gate_channels: int = 32
    gate_scale: float = 2.0
    qk_scale: float = 1.0
    smears: bool = False
    lookups: tuple[int, ...] = ()
    entries: tuple[int, ...] = ()
    lookup_width: int = 48
    tied: bool = True
    key_norm: bool = False
    lookup_scale: float = 1.0

    def config(self, **changes) -> NanoConfig:
        """The same model as a configuration."""
        fields = {
            "seq_len": self.length,
            "hidden_dim": self.width,
            "num_layers": self.num_layers,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "window_pattern": self.pattern,
            "short_window_fraction": min(self.short / self.length, 1.0),
            "rope": DefaultRotary(theta=self.base),
            "rope_dtype": "bfloat16" if self.rounds_rope else "float32",
            "qk_scale": self.qk_scale,
            "value_gate_channels": self.gate_channels,
            "value_gate_scale": self.gate_scale,
            "smear_channels": 24 if self.smears else 0,
            "backout": 0.2 if self.smears else None,
            "lookup": self.lookup,
        }
        return NanoConfig(**{**fields, **changes})

    @property
    def lookup(self) -> LookupConfig | None:
        if not self.lookups:
            return None
        options = {"mlp_dim": self.lookup_width, "tied": self.tied, "key_norm": self.key_norm}
        options |= {"num_entries": sum(self.entries), "max_entries": max(self.entries)}
        return LookupConfig(list(self.lookups), score_scale=self.lookup_scale, allocation="nanochat", **options)

    @property
    def bounds(self) -> dict[str, np.ndarray]:
        """The buffers of the lookup layers."""
        return {f"l3_layers.{i}.bounds": np.cumsum([0, *self.entries]) for i in self.lookups}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """nanochat's tensors, with the vocabulary padded to a multiple of 64."""
        d, head = self.width, self.width // self.heads
        rows, kv = -(-self.vocab // 64) * 64, self.kv_heads * head
        shapes = {"transformer.wte.weight": (rows, d), "lm_head.weight": (rows, d)}
        shapes |= {"resid_lambdas": (self.num_layers,), "x0_lambdas": (self.num_layers,)}
        if self.smears:
            shapes |= {"smear_gate.weight": (1, 24), "smear_lambda": (1,), "backout_lambda": (1,)}
        for i in range(self.num_layers):
            layer = f"transformer.h.{i}."
            shapes |= {f"{layer}attn.c_q.weight": (d, d), f"{layer}attn.c_proj.weight": (d, d)}
            shapes |= {f"{layer}attn.c_k.weight": (kv, d), f"{layer}attn.c_v.weight": (kv, d)}
            shapes |= {f"{layer}mlp.c_fc.weight": (4 * d, d), f"{layer}mlp.c_proj.weight": (d, 4 * d)}
            if self.has_value(i):
                shapes |= {f"{layer}attn.ve_gate.weight": (self.kv_heads, self.gate_channels)}
                shapes |= {f"value_embeds.{i}.weight": (rows, kv)}
        for i in self.lookups:
            layer, table = f"l3_layers.{i}.", (sum(self.entries), d)
            shapes |= {f"{layer}{name}_weight": table for name in (["kv"] if self.tied else ["k", "v"])}
            shapes |= {f"{layer}w_up.weight": (self.lookup_width, d)}
            shapes |= {f"{layer}w_mix.weight": (d, self.lookup_width + d)}
        return shapes

    def has_value(self, layer: int) -> bool:
        return (self.num_layers - 1 - layer) % 2 == 0

    def weights(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random weights, none of them zero, with a unit scale where the model has one."""
        rng = np.random.default_rng(seed)
        weights = {name: rng.normal(0, 1, shape) for name, shape in self.shapes().items()}
        for name, weight in weights.items():
            if name == "resid_lambdas":
                weights[name] = 1 + 0.1 * weight
            elif weight.ndim == 2 and not name.startswith(("transformer.wte", "value_embeds")):
                weights[name] = weight / math.sqrt(weight.shape[1])
            elif weight.ndim == 1:
                weights[name] = 0.3 * weight
        return weights

    def logits(self, w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """Soft-capped logits [batch, position, vocab]."""
        x = norm(w["transformer.wte.weight"][tokens])
        if self.smears:
            gate = w["smear_lambda"] * torch.sigmoid(x[:, 1:, :24] @ w["smear_gate.weight"].T)
            x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
        first, middle = x, None
        for i in range(self.num_layers):
            x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * first
            x = x + self.attention(w, i, norm(x), tokens)
            layer = f"transformer.h.{i}.mlp."
            x = x + F.relu(norm(x) @ w[f"{layer}c_fc.weight"].T).square() @ w[f"{layer}c_proj.weight"].T
            if i in self.lookups:
                x = x + self.looked_up(w, f"l3_layers.{i}.", x, tokens)
            middle = x if i == self.num_layers // 2 else middle
        if self.smears:
            x = x - w["backout_lambda"] * middle
        logits = (norm(x) @ w["lm_head.weight"].T)[..., : self.vocab]
        return 15 * torch.tanh(logits / 15)

    def looked_up(self, w, layer: str, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        bounds, read = np.cumsum([0, *self.entries]), []
        for token, h in zip(tokens.flatten().tolist(), norm(x).flatten(0, 1), strict=True):
            rows = slice(int(bounds[token]), int(bounds[token + 1]))
            keys, values = (w[f"{layer}{name}_weight"][rows] for name in (["kv", "kv"] if self.tied else ["k", "v"]))
            scores = self.lookup_scale * (norm(keys) if self.key_norm else keys) @ h
            read.append(scores.softmax(0) @ values)
        up = norm(torch.stack(read).view(x.shape) @ w[f"{layer}w_up.weight"].T)
        return torch.cat([up, x], -1) @ w[f"{layer}w_mix.weight"].T

    def attention(self, w, i: int, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, _ = h.shape
        layer, head = f"transformer.h.{i}.attn.", self.width // self.heads
        q = (h @ w[f"{layer}c_q.weight"].T).view(batch, length, self.heads, head)
        k, v = ((h @ w[f"{layer}{n}.weight"].T).view(batch, length, self.kv_heads, head) for n in ("c_k", "c_v"))
        if self.has_value(i):
            gate = self.gate_scale * torch.sigmoid(h[..., : self.gate_channels] @ w[f"{layer}ve_gate.weight"].T)
            v = v + gate[..., None] * w[f"value_embeds.{i}.weight"][tokens].view(v.shape)
        q, k = (self.qk_scale * norm(self.rotated(part)) for part in (q, k))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 2) for part in (k, v))
        back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        is_short = i < self.num_layers - 1 and self.pattern[i % len(self.pattern)] == "S"
        seen = (back >= 0) & (back <= (self.short if is_short else self.length))
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(head)
        y = torch.einsum("bnqk,bknh->bqnh", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
        return y.reshape(batch, length, -1) @ w[f"{layer}c_proj.weight"].T

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates the two halves of each head by minus the angle."""
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * self.base ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = (part.to(torch.bfloat16) if self.rounds_rope else part for part in (angles.cos(), angles.sin()))
        cos, sin = (part.to(x.dtype)[:, None, :] for part in (cos, sin))
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1.1920929e-7)


EARLY = Reference()
LATE = Reference(
    short=128, base=100_000.0, rounds_rope=False, gate_channels=12, gate_scale=3.0, qk_scale=1.2, smears=True
)
