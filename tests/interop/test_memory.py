"""Measures the memory of an import: a 1 GB Llama in eight files, under FSDP on eight devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.family import config_to_json, family_of_config
from jaxlm.interop.hf.safetensors_file import TensorInfo, in_shards, shard_names, write_safetensors
from jaxlm.interop.hf.weights import expanded

CONFIG = LlamaConfig(seq_len=64, hidden_dim=2048, intermediate_dim=5632, num_layers=10, num_heads=16, num_kv_heads=4)
VOCAB = 16000
SIZES = {"embed": 2048, "mlp": 5632, "heads": 16, "kv_heads": 4, "head_size": 128, "vocab": VOCAB, "layers": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A gigabyte of random bfloat16 numbers, written without holding them in memory."""
    folder = tmp_path_factory.mktemp("gigabyte")
    family = family_of_config(CONFIG)
    rows = expanded(family.tensors(CONFIG), lambda _: SIZES)
    infos = {name: TensorInfo(tensor.shape(SIZES), np.dtype(jnp.bfloat16)) for name, tensor, _ in rows}
    total = sum(info.num_bytes for info in infos.values())
    shards = list(in_shards(infos, total // 7))
    files = shard_names(len(shards))
    rng = np.random.default_rng(0)
    for file, shard in zip(files, shards, strict=True):
        arrays = (rng.integers(0x3C00, 0x3D00, i.shape, np.uint16).view(jnp.bfloat16) for i in shard.values())
        write_safetensors(folder / file, shard, arrays)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = config_to_json(family, CONFIG) | {"vocab_size": VOCAB, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert total > 0.95e9
    assert len(files) == 8
    return folder


def measured(folder, importer):
    root = Path(__file__).parents[2]
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(root / "src")}
    # Otherwise glibc keeps some freed blocks, from 4 to 12 MB. Freed memory must be returned to the system.
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    command = [sys.executable, str(root / "tests" / "interop" / "import_memory.py"), str(folder), importer]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    print(importer, result.stdout)
    return json.loads(result.stdout)


@pytest.mark.slow
def test_an_import_needs_at_most_one_shard_beside_the_model(folder):
    found = measured(folder, "jaxlm")
    assert found["above_model"] <= 1.15 * found["largest_slice"]


@pytest.mark.soak
def test_an_import_takes_at_most_twice_as_long_as_transformers(folder):
    pytest.importorskip("transformers")
    assert measured(folder, "jaxlm")["seconds"] <= 2 * measured(folder, "transformers")["seconds"] + 5
