"""PyTorch: a plain GPT-2, eager or compiled. Arguments: eager | compile, float32 | bfloat16 (under autocast)."""

import itertools
import sys

import common
import torch
from torch_models import Decoder, Shape, optimizer_of

SHAPE = Shape(
    family="gpt2",
    hidden=common.HIDDEN,
    layers=common.LAYERS,
    heads=common.HEADS,
    kv_heads=common.HEADS,
    mlp=4 * common.HIDDEN,
    seq_len=common.SEQ_LEN,
    vocab=common.VOCAB,
    tied=True,
)


def load(model, given):
    put = lambda parameter, *arrays: parameter.data.copy_(torch.cat([torch.from_numpy(a) for a in arrays], 1).T)  # noqa: E731
    model.tokens.weight.data.copy_(torch.from_numpy(given["tokens"]))
    model.positions.weight.data.copy_(torch.from_numpy(given["positions"]))
    for i, block in enumerate(model.blocks):
        put(block.attention.qkv.weight, *(given[f"{i}.{n}"] for n in "qkv"))
        for name, layer in (("o", block.attention.out), ("up", block.mlp.up), ("down", block.mlp.down)):
            put(layer.weight, given[f"{i}.{name}"])


def main():
    form, dtype = sys.argv[1:]
    clock = common.Clock(version=torch.__version__, dtype=dtype)
    model = Decoder(SHAPE)
    load(model, common.weights())
    optimizer = optimizer_of(
        model,
        learning_rate=common.LEARNING_RATE,
        betas=common.BETAS,
        epsilon=common.EPSILON,
        weight_decay=common.WEIGHT_DECAY,
    )
    loss_of = torch.compile(model) if form == "compile" else model
    for step in itertools.count():
        inputs, targets = (torch.from_numpy(a).long() for a in common.batch(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not clock.tick(loss.item()):
            break


main()
