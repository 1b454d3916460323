"""Writes folders whose weights are stored as codes with scales, and what they stand for, with loops over blocks."""

import json
import re
import shutil
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.interop.hf.families.gpt_oss import GptOssConfig
from jaxlm.interop.hf.safetensors_file import SafetensorsFile, TensorInfo, write_safetensors
from jaxlm.models.base import vocab_axis
from tests.interop.cases import exported

MATRICES = r"\.(\w+_proj|\w+_proj_with_mqa|w\d|dense\w*|fc\d|c_\w+|experts\.\w+)(\.weight)?$"
"""Names of tensors that are stored in fp8."""
LUT = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def rewritten(folder, change, quantization=None):
    """Rewrites a folder's tensors. Args: change: name, array -> (name, array) pairs."""
    file = SafetensorsFile(folder / "model.safetensors")
    arrays = {new: out for name in file.tensors for new, out in change(name, np.array(file.view(name)))}
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(folder / "new", infos, arrays.values())
    (folder / "new").rename(folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        content["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def in_fp8(matrix, block, kind="F32"):
    """The codes, the scales (F32, BF16, E8M0 or U8), and the float32 matrix that they stand for."""
    rows, columns = matrix.shape[-2:]
    height, width = block or (rows, columns)
    grid = (*matrix.shape[:-2], -(-rows // height), -(-columns // width))
    codes, scales = np.empty(matrix.shape, jnp.float8_e4m3fn), np.empty(grid, np.float32)
    exact = np.empty(matrix.shape, np.float32)
    for index in np.ndindex(*grid):
        *outer, i, j = index
        part = (*outer, slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        scale = np.abs(matrix[part]).max() / 448
        scale = 2.0 ** np.ceil(np.log2(scale)) if kind in ("E8M0", "U8") else scale
        scales[index] = np.float32(scale).astype(jnp.bfloat16) if kind == "BF16" else scale
        codes[part] = (matrix[part] / scales[index]).astype(jnp.float8_e4m3fn)
        exact[part] = codes[part].astype(np.float32) * scales[index]
    kinds = {"F32": np.float32, "BF16": jnp.bfloat16, "E8M0": jnp.float8_e8m0fnu}
    stored = (np.log2(scales) + 127).astype(np.uint8) if kind == "U8" else scales.astype(kinds[kind])
    return codes, stored, exact


def as_fp8(folder, block=(16, 8), kind="F32", scale="_scale_inv", skipped="x^", *, pattern=MATRICES):
    """Stores a folder's matrices in fp8. Returns the folder, and one with what it stands for."""
    decoded = Path(shutil.copytree(folder, folder.parent / f"{folder.name}-decoded"))

    def is_stored(name, array):
        return array.ndim > 1 and re.search(pattern, name) and not re.search(skipped, name)

    def stored(name, array):
        if not is_stored(name, array):
            return [(name, array)]
        codes, scales, _ = in_fp8(array.astype(np.float32), block, kind)
        named = name + scale if scale.startswith("_") else name.removesuffix(".weight") + scale
        if block is None and array.ndim == 2:  # as Ministral 3
            scales = scales.reshape(())
            static = (name.removesuffix(".weight") + ".activation_scale", np.float32(0.5).reshape(()))
            return [(name, codes), (named, scales), static]
        return [(name, codes), (named, scales)]

    def exact(name, array):
        return [(name, in_fp8(array.astype(np.float32), block, kind)[2] if is_stored(name, array) else array)]

    config = {"quant_method": "fp8", "weight_block_size": block and list(block), "modules_to_not_convert": ["lm_head"]}
    rewritten(decoded, exact)
    return rewritten(folder, stored, config | {"activation_scheme": "dynamic" if block else "static"}), decoded


def in_mxfp4(experts):
    """Blocks and scales of [experts, in, out], and the float32 numbers that they stand for."""
    rows = experts.swapaxes(1, 2).astype(np.float32)  # [experts, out, in]
    groups = rows.reshape(*rows.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    table = np.array(LUT[:8])
    sizes = np.abs(groups) / 2.0 ** exponents[..., None]
    codes = np.abs(sizes[..., None] - table).argmin(-1)
    codes = codes + 8 * (groups < 0)
    exact = np.array(LUT)[codes] * 2.0 ** exponents[..., None]
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    exact = exact.reshape(rows.shape).swapaxes(1, 2).astype(np.float32)
    return blocks, (exponents + 127).astype(np.uint8), np.ascontiguousarray(exact)


def saved_gpt_oss(folder, vocab):
    """A gpt-oss with N(0, 0.2) in every parameter and experts that are not square, in bfloat16."""
    sizes = {
        "hidden_dim": 64,
        "intermediate_dim": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    config = GptOssConfig(seq_len=64, sliding_window=16, num_experts=4, num_experts_per_token=2, **sizes)
    model = config.build(vocab_axis(vocab), key=jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 40))
    model = tree.map_leaves(lambda _, leaf: hax.random.normal(next(keys), leaf.axes) * 0.2, model)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return exported(folder, model, config, dtype=jnp.bfloat16, special_ids=ids)


def as_mxfp4(folder, pattern=r"experts\.(gate_up|down)_proj$"):
    """Stores a folder's experts [experts, in, out] in MXFP4. Returns the folder, and one with what it stands for."""
    decoded = Path(shutil.copytree(folder, folder.parent / f"{folder.name}-decoded"))

    def stored(name, array):
        if not re.search(pattern, name):
            return [(name, array)]
        blocks, scales, _ = in_mxfp4(array)
        return [(f"{name}_blocks", blocks), (f"{name}_scales", scales)]

    def exact(name, array):
        return [(name, in_mxfp4(array)[2].astype(array.dtype) if re.search(pattern, name) else array)]

    rewritten(decoded, exact)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return rewritten(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": skipped}), decoded
