"""Decoupled attention as a folder with code of its own: read by transformers, and read again."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.interop.hf.folder import load_model, open_folder, save_folder
from jaxlm.interop.hf.verify import verify_folder
from tests.engine.helpers import one_device
from tests.systems.upcycle.test_dba import VARIANTS, VOCAB, built
from tests.tiers import one_of

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("config", one_of(VARIANTS.values(), but=2), ids=VARIANTS.keys())
def test_transformers_computes_and_generates_the_same(config, tmp_path):
    """With and without a cache. The text is longer than the window of "geometric alone"."""
    folder, layout = tmp_path / "model", one_device()
    model = built(config)
    save_folder(folder, model, config, layout, dtype=np.float32, files={}, special_ids={})
    summary = verify_folder(folder, model, config, layout)
    assert re.match("verified with transformers .* the same 31 greedy tokens", summary), summary


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
def test_a_folder_that_is_read_again_is_the_same_to_the_bit(dtype, tmp_path):
    folder, layout, config = tmp_path / "model", one_device(), VARIANTS["everything"]
    model = built(config)
    save_folder(folder, model, config, layout, dtype=np.dtype(dtype), files={}, special_ids={})
    opened = open_folder(folder)
    assert dataclasses.replace(opened.config, output_bias=None, head_dim=config.head_dim) == config
    abstract = jax.eval_shape(lambda: config.build(VOCAB, key=jax.random.key(0)))
    read = dict(tree.leaves(load_model(folder, abstract, opened.config, layout)))
    for path, leaf in tree.leaves(model):
        expected = leaf.array.astype(dtype) if tree.is_inexact(leaf) else leaf.array
        np.testing.assert_array_equal(
            read[path].array, np.asarray(expected).astype(read[path].array.dtype), err_msg=path
        )


@pytest.mark.slow
def test_the_folder_says_where_its_code_is(tmp_path):
    folder, config = tmp_path / "model", VARIANTS["plain"]
    save_folder(folder, built(config), config, one_device(), dtype=np.float32, files={}, special_ids={})
    content = json.loads((folder / "config.json").read_text())
    module, name = content["auto_map"]["AutoModelForCausalLM"].split(".")
    assert f"class {name}(" in (folder / f"{module}.py").read_text()
    assert content["architectures"] == [name]
