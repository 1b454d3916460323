"""Writes tests/vectors/bitsandbytes.json: what bitsandbytes makes of moments, and AdamW in torch with such moments.

    pip install torch bitsandbytes==0.50.2
    python tests/optim/bitsandbytes_vectors.py

Its portable kernel rounds to the nearest code, as its kernel for GPUs does. The one for CPUs looks the code up in a table for
65,536 numbers between -1 and 1, so that it finds the nearest one of a number that is rounded to these first.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

VECTORS = Path(__file__).parents[1] / "vectors" / "bitsandbytes.json"
BLOCK, NUM_STEPS, BETAS, RATE, DECAY = 256, 20, (0.9, 0.95), 1e-2, 0.1
SHAPES = {"even": (16, 32), "odd": (10, 30)}
MAPS = {"signed": True, "unsigned": False}


def moments(name: str) -> np.ndarray:
    """Moments over eight decades, 6 blocks of which one is zero and the last is short."""
    rng = np.random.default_rng(0)
    values = (rng.normal(size=1400) * 10 ** rng.uniform(-8, 0, 1400)).astype(np.float32)
    values[512:768] = 0
    return values if MAPS[name] else values**2


def parameters_and_gradients(seed: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Parameters, and the gradients of each step: some elements always have smaller ones than others."""
    rng = np.random.default_rng(seed)
    draw = lambda scale: {k: (s * rng.normal(size=SHAPES[k])).astype(np.float32) for k, s in scale.items()}  # noqa: E731
    scales: Any = {name: 10 ** rng.uniform(-2, 0, shape) for name, shape in SHAPES.items()}
    return draw(dict.fromkeys(SHAPES, 1.0)), [draw(scales) for _ in range(NUM_STEPS)]


def portable_codes(values: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_blockwise` of the backend that bitsandbytes has for all devices."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    return torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(keys, values, code, BLOCK)


def main() -> None:
    vectors: dict[str, Any] = {"about": "bitsandbytes 0.50.2, by tests/optim/bitsandbytes_vectors.py; arrays are hex"}
    for name, is_signed in MAPS.items():
        code, values = functional.create_dynamic_map(is_signed), torch.tensor(moments(name))
        codes, absmax = portable_codes(values, code)
        cpu_codes, state = functional.quantize_blockwise(values, code=code, blocksize=BLOCK)
        decoded = functional.dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=BLOCK)
        arrays = {"map": code, "codes": codes, "absmax": state.absmax, "cpu_codes": cpu_codes, "decoded": decoded}
        vectors[name] = {key: array.numpy().tobytes().hex() for key, array in arrays.items()}
    seed = next(seed for seed in range(1000) if trained(seed) is not None)
    after = trained(seed)
    vectors["adamw"] = {"seed": seed, "after": {k: p.numpy().tobytes().hex() for k, p in (after or {}).items()}}
    VECTORS.write_text(json.dumps(vectors, indent=1) + "\n")


def trained(seed: int) -> dict[str, torch.Tensor] | None:
    """Parameters after AdamW; None if a moment is within a few roundings of the middle of two codes."""
    start, gradients = parameters_and_gradients(seed)
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=RATE, betas=BETAS, eps=1e-8, weight_decay=DECAY)
    for gradient in gradients:
        for name, param in params.items():
            param.grad = torch.tensor(gradient[name])
        optimizer.step()
        for state in optimizer.state.values():
            for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
                code = functional.create_dynamic_map(is_signed)
                codes, absmax = portable_codes(state[key], code)
                if is_near_middle(state[key], absmax, code):
                    return None
                state[key] = functional.dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=BLOCK)
    return {name: param.detach() for name, param in params.items()}


def is_near_middle(values: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor) -> bool:
    """Whether another order of additions could give another code."""
    scaled = values.flatten() / absmax.repeat_interleave(BLOCK)[: values.numel()]
    middles = (code[1:] + code[:-1]) / 2
    distances = (scaled[:, None] - middles).abs().min(1).values
    return bool((distances < 1e-6 * scaled.abs()).any())


if __name__ == "__main__":
    main()
