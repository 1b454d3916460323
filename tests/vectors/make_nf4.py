"""Makes `nf4.json` with bitsandbytes: pip install bitsandbytes==0.50.2 torch==2.13.0; python tests/vectors/make_nf4.py."""

import json
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import torch

SHAPES = ((5, 128), (4, 80), (5, 33))


def case(shape: tuple[int, int], seed: int) -> dict[str, Any]:
    """A weight with outliers and a row of zeros, and what bitsandbytes makes of it."""
    rng = np.random.default_rng(seed)
    weight = (0.02 * rng.standard_normal(shape) * (1 + 9 * (rng.random(shape) < 0.02))).astype(np.float32)
    weight[1] = 0
    quantize: Any = bitsandbytes.functional.quantize_4bit
    codes, plain = quantize(torch.tensor(weight), blocksize=64, quant_type="nf4", compress_statistics=False)
    _, state = quantize(torch.tensor(weight), blocksize=64, quant_type="nf4", compress_statistics=True)
    return {
        "shape": shape,
        "weight": weight.ravel().tolist(),
        "codes": codes.ravel().tolist(),
        "absmax": plain.absmax.tolist(),
        "scale_codes": state.absmax.tolist(),
        "scale_maxima": state.state2.absmax.tolist(),
        "scale_mean": state.offset.item(),
        "floats": floats_of(codes, state, weight.size).tolist(),
    }


def floats_of(codes: torch.Tensor, state: Any, size: int) -> np.ndarray:
    """What the codes stand for: the table's value times the block's scale. On CPUs, `dequantize_4bit` of bitsandbytes 0.50.2
    takes the scale of another block where the blocks of a larger matrix cross rows, so it is not asked."""
    functional: Any = bitsandbytes.functional
    scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    packed = codes.numpy().ravel()
    values = functional.get_4bit_type("nf4", "cpu").numpy()[np.stack([packed >> 4, packed & 15], axis=1).ravel()]
    return values[:size] * np.repeat(scales.numpy(), 64)[:size]


if __name__ == "__main__":
    vectors = {
        "source": f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}: python tests/vectors/make_nf4.py",
        "table": bitsandbytes.functional.get_4bit_type("nf4", "cpu").tolist(),
        "scale_table": bitsandbytes.functional.create_dynamic_map().tolist(),
        "cases": [case(shape, seed) for seed, shape in enumerate(SHAPES)],
    }
    Path(__file__).with_name("nf4.json").write_text(json.dumps(vectors) + "\n")
