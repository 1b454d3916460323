"""Topologies that spell out a family, in Hugging Face's format; others are refused with the reason."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.family import family_of_config
from jaxlm.interop.hf.folder import load_model, save_folder
from jaxlm.interop.hf.verify import verify_folder
from jaxlm.models.base import as_family
from jaxlm.systems.topology.model import TopologyConfig
from tests.engine.helpers import one_device
from tests.systems.topology.test_topology import ALTERNATING, FAMILIES, LLAMA, VOCAB, built, spelled, topology
from tests.tiers import one_of


@pytest.mark.parametrize(("family", "attention", "mlp"), FAMILIES.values(), ids=FAMILIES)
def test_the_family_is_the_one_that_is_spelled_out(family, attention, mlp):
    assert as_family(spelled(attention, mlp)) == family


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(["dba", "mixtral", "llama"], but=2))
def test_transformers_computes_the_same(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config, folder = spelled(*FAMILIES[name][1:]), tmp_path / "model"
    model = built(config)
    save_folder(folder, model, config, one_device(), dtype=np.float32, files={}, special_ids={})
    assert re.match(
        "verified with transformers .* the same 31 greedy tokens", verify_folder(folder, model, config, one_device())
    )


@pytest.mark.slow
def test_weights_of_a_folder_are_read_into_a_topology(tmp_path):
    family, attention, mlp = FAMILIES["llama"]
    model, config = built(family), spelled(attention, mlp)
    save_folder(tmp_path / "model", model, family, one_device(), dtype=np.float32, files={}, special_ids={})
    abstract = jax.eval_shape(lambda: config.build(VOCAB, key=jax.random.key(0)))
    read = dict(tree.leaves(load_model(tmp_path / "model", abstract, config, one_device())))
    for path, leaf in tree.leaves(model):
        np.testing.assert_array_equal(read[path].array, leaf.array, err_msg=path)


def changed(old: str, new: str) -> TopologyConfig:
    assert old in LLAMA
    return topology(LLAMA.replace(old, new, 1))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (topology(ALTERNATING), "layer 1 differs from layer 0"),
        (changed("num_kv_heads: 2}", "num_kv_heads: 2, rope: null}"), "rope: null"),
        (changed("num_kv_heads: 2}", "num_kv_heads: 2, dropout: 0.5}"), r"has dropout \(0\.5\)"),
        (changed("num_kv_heads: 2}", "num_kv_heads: 2, output_bias: true}"), "output_bias: True"),
        (
            changed("rms_norm", "rms_norm, epsilon: 0.1"),
            "norms, of which the last one must be before the head, are not",
        ),
        (changed("  - {type: rms_norm}\n", ""), "norms, of which the last one must be before the head, are not"),
        (changed("rms_norm", "layer_norm"), "a layer is not a residual of rms_norm and attention"),
        (changed("swiglu", "mlp"), "its MLP is not swiglu, glu or moe"),
        (changed("type: swiglu", "type: moe, norm_topk_prob: false"), "its moe has norm_topk_prob: false"),
    ],
)
def test_other_topologies_have_no_format(config, reason):
    config.check()
    with pytest.raises(ConfigError, match=rf"model\.topology: this topology is not a family .*{reason}"):
        family_of_config(config)


def test_how_it_is_computed_is_kept():
    config = dataclasses.replace(topology(LLAMA), scan_layers=False, gradient_checkpointing="cheap", seq_len=64)
    family = as_family(config)
    assert (family.scan_layers, family.gradient_checkpointing, family.seq_len) == (False, "cheap", 64)
