"""PyTorch: a compiled training step in bfloat16 with its fastest attention backend. Argument: one JSON object.

    {"shape": {...}, "rows": 16, "steps": 20, "warmup": 5}

Tries every backend of scaled_dot_product_attention at the model's shape and uses the fastest. If a batch does not fit
into memory, splits it into the fewest microbatches that do. Parameters, gradients and optimizer state are float32.
"""

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_models import Decoder, Shape, optimizer_of

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def attention_seconds(shape: Shape, rows: int, repeats: int) -> dict[str, float]:
    """Median seconds of forward and backward, by backend. Backends that cannot run are omitted."""
    seconds = {}
    for name, backend in BACKENDS.items():
        q, k, v = (heads_of(shape, rows, num) for num in (shape.heads, shape.kv_heads, shape.kv_heads))
        try:
            with sdpa_kernel([backend]):
                seconds[name] = statistics.median(attend_once(q, k, v) for _ in range(repeats + 2))
        except RuntimeError as error:  # no such kernel, or not enough memory
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return seconds


def heads_of(shape: Shape, rows: int, num: int) -> torch.Tensor:
    size = (rows, num, shape.seq_len, shape.head_size)
    return torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def attend_once(q, k, v) -> float:
    synchronize()
    began = time.perf_counter()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    synchronize()
    return time.perf_counter() - began


def train(shape: Shape, rows: int, num_micro: int, steps: int) -> list[float]:
    """Seconds per step, for every step."""
    torch.manual_seed(0)
    model = Decoder(shape).to(DEVICE)
    optimizer = optimizer_of(model, learning_rate=3e-4, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    loss_of = torch.compile(model)
    batches = [torch.randint(shape.vocab, (rows, shape.seq_len + 1), device=DEVICE) for _ in range(4)]
    seconds = []
    for number in range(steps):
        synchronize()
        began = time.perf_counter()
        for part in batches[number % 4].chunk(num_micro):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = loss_of(part[:, :-1], part[:, 1:]) / num_micro
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def train_in_memory(shape: Shape, rows: int, steps: int) -> tuple[list[float], int]:
    """Seconds per step, and the smallest number of microbatches that fits."""
    num_micro = 1
    while True:
        try:
            return train(shape, rows, num_micro, steps), num_micro
        except torch.OutOfMemoryError:
            if num_micro == rows:
                raise
            num_micro *= 2
        torch.cuda.empty_cache()
        torch.compiler.reset()


def main():
    request = json.loads(sys.argv[1])
    shape, rows, warmup = Shape(**request["shape"]), request["rows"], request["warmup"]
    torch.set_float32_matmul_precision("high")
    kernels = attention_seconds(shape, rows, request["steps"])
    best = min(kernels, key=lambda name: kernels[name])
    with sdpa_kernel([BACKENDS[best]]):
        seconds, num_micro = train_in_memory(shape, rows, warmup + request["steps"])
    measured = seconds[warmup:]
    step = statistics.median(measured)
    quartiles = statistics.quantiles(measured, n=4) if len(measured) > 1 else [step] * 3
    answer = {
        "tokens_per_second": rows * shape.seq_len / step,
        "step_seconds": step,
        "step_seconds_spread": quartiles[2] - quartiles[0],
        "compile_seconds": seconds[0],
        "peak_bytes": torch.cuda.max_memory_allocated() if CUDA else None,
        "micro_batches": num_micro,
        "attention": best,
        "attention_seconds": kernels,
        "torch": torch.__version__,
    }
    print(json.dumps(answer))


main()
