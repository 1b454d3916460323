"""PyTorch: GPT-2 as one would write it, eager or compiled. Arguments: steps, eager | compile."""

import sys

import common
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(common.HIDDEN, 3 * common.HIDDEN), nn.Linear(common.HIDDEN, common.HIDDEN)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (a.view(rows, length, common.HEADS, -1).transpose(1, 2) for a in self.qkv(x).split(common.HIDDEN, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, common.HIDDEN))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(common.HIDDEN), nn.LayerNorm(common.HIDDEN), Attention()
        self.up, self.down = nn.Linear(common.HIDDEN, 4 * common.HIDDEN), nn.Linear(4 * common.HIDDEN, common.HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(common.VOCAB, common.HIDDEN),
            nn.Embedding(common.SEQ_LEN, common.HIDDEN),
        )
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(common.LAYERS)), nn.LayerNorm(common.HIDDEN)

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.view(-1, common.VOCAB), targets.reshape(-1))

    def load(self, given):
        put = lambda parameter, *arrays: parameter.data.copy_(torch.cat([torch.from_numpy(a) for a in arrays], 1).T)  # noqa: E731
        self.tokens.weight.data.copy_(torch.from_numpy(given["tokens"]))
        self.positions.weight.data.copy_(torch.from_numpy(given["positions"]))
        for i, block in enumerate(self.blocks):
            put(block.attention.qkv.weight, *(given[f"{i}.{n}"] for n in "qkv"))
            for name, layer in (("o", block.attention.out), ("up", block.up), ("down", block.down)):
                put(layer.weight, given[f"{i}.{name}"])
            for layer in (block.attention.qkv, block.attention.out, block.up, block.down):
                nn.init.zeros_(layer.bias)


def main():
    mode = sys.argv[2]
    clock = common.Clock(f"torch {mode}", common.num_steps())
    model = Gpt2()
    model.load(common.weights())
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "tokens" not in n and "positions" not in n]
    others = [p for p in model.parameters() if all(p is not d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": common.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=common.LEARNING_RATE, betas=common.BETAS, eps=common.EPSILON, fused=True)
    loss_of = torch.compile(model) if mode == "compile" else model
    for step in range(clock.num_steps):
        inputs, targets = (torch.from_numpy(a).long() for a in common.batch(step))
        loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.tick(loss.item())
    clock.answer(version=torch.__version__)


main()
