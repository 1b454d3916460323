"""Sizes, initialization, FLOPs and errors of the model configurations."""

import dataclasses
import re

import draccus
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.interop.hf.families.gemma2 import Gemma2Config
from jaxlm.interop.hf.families.gemma3 import Gemma3Config
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.qwen2 import Qwen2Config
from jaxlm.interop.hf.families.qwen3_5_moe import Qwen35MoeConfig
from jaxlm.interop.hf.families.qwen3_moe import Qwen3MoeConfig
from jaxlm.interop.hf.families.smollm3 import SmolLm3Config
from jaxlm.models.attention.backends.blockwise import Reach, query_blocks
from jaxlm.models.base import Inputs, ModelConfig, vocab_axis
from jaxlm.models.loss import next_token_sums
from jaxlm.models.rope import DefaultRotary, DynamicRotary, Llama3Rotary, YarnRotary


def num_parameters(config, vocab):
    shapes = jax.eval_shape(lambda key: config.build(vocab_axis(vocab), key=key), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_the_papers_sizes():
    assert num_parameters(Gpt2Config(), 50257) == 124_439_808
    assert num_parameters(LlamaConfig(), 32000) == 6_738_415_616
    llama_3_2_1b = LlamaConfig(
        hidden_dim=2048, intermediate_dim=8192, num_layers=16, num_kv_heads=8, tie_word_embeddings=True
    )
    assert num_parameters(llama_3_2_1b, 128256) == 1_235_814_400


@pytest.mark.parametrize(
    ("config", "vocab", "giga"),
    [
        (Gpt2Config(), 50304, 0.798),
        (Gpt2Config(hidden_dim=1600, num_layers=48, num_heads=25), 50304, 9.80),
        (LlamaConfig(seq_len=4096), 32000, 42.86),
        (
            LlamaConfig(
                seq_len=4096,
                hidden_dim=2048,
                intermediate_dim=8192,
                num_layers=16,
                num_kv_heads=8,
                tie_word_embeddings=True,
            ),
            128256,
            8.22,
        ),
    ],
    ids=["gpt2-124M", "gpt2-1.5B", "llama2-7B", "llama3.2-1B"],
)
def test_flops_of_known_models(config, vocab, giga):
    """Causal FLOPs per token, which reproduce published throughputs."""
    assert config.flops_per_token(vocab).causal / 1e9 == pytest.approx(giga, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Gpt2Config(seq_len=256, hidden_dim=384, num_layers=2, num_heads=3),
        LlamaConfig(seq_len=256, hidden_dim=384, intermediate_dim=1024, num_layers=2, num_heads=3, num_kv_heads=1),
    ],
    ids=["gpt2", "llama"],
)
def test_flops_match_xlas_count(config):
    config = dataclasses.replace(config, scan_layers=False, gradient_checkpointing="none")
    Batch, Vocab = hax.Axis("batch", 1), vocab_axis(2048)
    tokens = hax.zeros((Batch, config.Pos), dtype=jnp.int32)

    def loss(model):
        hidden = model.hidden(Inputs(tokens, tokens, tokens)).final
        return next_token_sums(hidden, model.lm_head(), tokens, tokens.astype(jnp.float32), chunk_tokens=256).total

    model = jax.eval_shape(lambda key: config.build(Vocab, key=key), jax.random.key(0))
    counted = jax.jit(jax.grad(loss)).lower(model).compile().cost_analysis()["flops"] / config.seq_len
    # XLA also multiplies masked positions inside a block. Of attention's seven products, the one that recomputes the
    # scores is eliminated as a common subexpression, because there is no remat.
    flops = config.flops_per_token(Vocab.size)
    weights = 2 * flops.causal - flops.palm
    square = sum((stop - start) * (last - first) for start, stop, first, last in query_blocks(config.seq_len, Reach()))
    attention = 6 * 2 * config.num_layers * config.hidden_dim * square / config.seq_len
    assert weights + attention == pytest.approx(counted, rel=0.03)


def test_flops_with_a_sliding_window():
    """Tokens of a long text attend to a whole window; the first tokens attend to fewer."""
    sizes = {"hidden_dim": 64, "intermediate_dim": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    seq_len, window = 32, 8
    seen = sum(min(t + 1, window) for t in range(seq_len)) / seq_len
    windowed = LlamaConfig(seq_len=seq_len, sliding_window=window, **sizes).flops_per_token(0)
    assert windowed.causal - (windowed.palm - 12 * 64 * seq_len) == pytest.approx(12 * 64 * seen, rel=0.08)
    assert windowed.causal < windowed.palm
    wide = LlamaConfig(seq_len=seq_len, sliding_window=100, **sizes).flops_per_token(0)
    assert wide == LlamaConfig(seq_len=seq_len, **sizes).flops_per_token(0)


def test_flops_of_bidirectional_attention():
    """As many later tokens as earlier ones, so that nothing is masked without a window."""
    sizes = {
        "hidden_dim": 64,
        "intermediate_dim": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 32,
    }
    both = Gemma3Config(seq_len=32, **sizes, sliding_window_pattern=1, use_bidirectional_attention=True)
    flops = both.flops_per_token(0)
    assert flops.causal == flops.palm
    causal = dataclasses.replace(both, use_bidirectional_attention=False).flops_per_token(0)
    assert flops.palm - causal.causal == 12 * 64 * 16


def test_flops_of_recurrent_layers_and_experts():
    """Qwen3.5 35B-A3B: what a token meets of each kind of layer, by the published sizes."""
    width, length, vocab = 2048, 8192, 248_320
    recurrent = width * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32)
    attention = width * (2 * 16 + 2 * 2 + 16) * 256
    experts = width * (3 * 512 * (8 + 1) + 256 + 1)
    weights = 30 * recurrent + 10 * attention + 40 * experts + width * vocab
    states = 30 * (24 * 32 * 128 * 128 + 6 * 4 * (2 * 16 + 32) * 128)
    expected = 6 * weights + states + 10 * 12 * 16 * 256 * length / 2
    assert Qwen35MoeConfig(seq_len=length).flops_per_token(vocab).causal == expected


def jitted_build(config, vocab):
    return jax.jit(lambda key: config.build(vocab_axis(vocab), key=key))(jax.random.key(0))


def std(named):
    return float(np.std(named.array))


@pytest.mark.slow
def test_gpt2_initialization():
    config = Gpt2Config(seq_len=512, hidden_dim=256, num_layers=8, num_heads=4)
    model = jitted_build(config, 1000)
    block = model.body.layers.stacked
    residual = 0.02 / np.sqrt(2 * 8)
    expected = [(model.tokens, 0.02), (model.positions, 0.01), (block.attn.q_proj, 0.02), (block.mlp.up_proj, 0.02)]
    expected += [(block.attn.o_proj, residual), (block.mlp.down_proj, residual)]
    for part, wanted in expected:
        assert std(part.weight) == pytest.approx(wanted, rel=0.02)
    assert float(jnp.abs(block.attn.q_proj.bias.array).max()) == 0
    plain = dataclasses.replace(config, use_bias=False)
    without = jax.eval_shape(lambda key: plain.build(vocab_axis(9), key=key), jax.random.key(0))
    assert {leaf.axes[1:] for leaf in named_leaves(without.body.layers) if len(leaf.axes) == 2} == {(config.Embed,)}
    assert without.body.final_norm.bias is without.body.layers.stacked.mlp.up_proj.bias is None


def named_leaves(tree):
    is_named = lambda leaf: isinstance(leaf, hax.NamedArray)  # noqa: E731
    return filter(is_named, jax.tree.leaves(tree, is_leaf=is_named))


@pytest.mark.slow
def test_llama_initialization():
    config = LlamaConfig(hidden_dim=256, intermediate_dim=512, num_layers=4, num_heads=4, num_kv_heads=2)
    model = jitted_build(config, 1000)
    block = model.body.layers.stacked
    for part in (model.tokens, model.head, block.attn.k_proj, block.attn.o_proj, block.mlp.down_proj):
        assert std(part.weight) == pytest.approx(0.02, rel=0.02)
    np.testing.assert_array_equal(block.attn_norm.weight.array, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gpt2Config(num_heads=5), r"model\.num_heads: 5 given, .* model\.hidden_dim = 768. Allowed: 1, 2, 3, 4, 6"),
        (LlamaConfig(num_heads=24), r"model\.num_heads: 24 given, .*4096"),
        (LlamaConfig(num_kv_heads=3), r"model\.num_kv_heads: 3 given, .* model\.num_heads = 32. Allowed: 1, 2, 4, 8"),
        (LlamaConfig(num_kv_heads=64), r"model\.num_kv_heads: 64 given"),
        (LlamaConfig(hidden_dim=96), r"model\.num_heads: 32 .* 3 features .* even"),
        (Gpt2Config(num_layers=0), r"model\.num_layers: 0 given, an integer of 1 or more"),
        (
            Gpt2Config(activation_function="swish"),
            r"model\.activation_function: 'swish' .* gelu, gelu_accurate, .*, relu, relu2, sigmoid, silu",
        ),
        (Gpt2Config(attn_pdrop=1.0), r"model\.attn_pdrop: 1\.0 given"),
        (LlamaConfig(rope=DefaultRotary(theta=0)), r"model\.rope\.theta: 0 given"),
        (LlamaConfig(rope=Llama3Rotary(high_freq_factor=1.0)), r"model\.rope\.high_freq_factor: 1\.0 given"),
        (LlamaConfig(rope=YarnRotary(theta=1.0)), r"model\.rope\.theta: 1\.0 given, but yarn"),
        (
            LlamaConfig(rope=YarnRotary(mscale=0.7)),
            r"model\.rope\.mscale: 0\.7 given without mscale_all_dim, .* Set all of mscale, mscale_all_dim, or none",
        ),
        (
            LlamaConfig(hidden_dim=64, rope=DynamicRotary()),
            r"model\.rope\.type: dynamic given, which needs more than 2 rotated features",
        ),
        (LlamaConfig(rope=Llama3Rotary(factor=0)), r"model\.rope\.factor: 0 given"),
        (
            SmolLm3Config(unrotated_layers=[0]),
            r"model\.no_rope_layer_interval: 4 given, and unrotated_layers: \[0\]\. Set one of the two",
        ),
        (SmolLm3Config(no_rope_layer_interval=None), "no_rope_layer_interval: null given, and unrotated_layers: null"),
        (
            SmolLm3Config(no_rope_layer_interval=None, unrotated_layers=[0, 36]),
            r"model\.unrotated_layers: \[0, 36\] given, different numbers from 0 to 35 expected",
        ),
        (
            Gemma2Config(local_layers=[0]),
            r"model\.local_layers: \[0\] given, and sliding_window_pattern: 2\. Set one of the two",
        ),
        (
            Qwen2Config(local_layers=[0]),
            r"model\.local_layers: \(0,\) given without sliding_window\. Set sliding_window",
        ),
        (
            Qwen2Config(sliding_window=4, max_window_layers=1, local_layers=[0]),
            r"model\.max_window_layers: 1 given together with local_layers: \(0,\)\. Remove one",
        ),
        (
            Qwen2Config(sliding_window=4, local_layers=[1, 1]),
            r"model\.local_layers: \[1, 1\] given, different numbers from 0 to 23 expected",
        ),
        (
            Qwen3MoeConfig(decoder_sparse_step=2),
            r"model\.dense_intermediate_dim: null given, but 24 layers have one MLP .* Set it",
        ),
        (
            Qwen3MoeConfig(dense_intermediate_dim=8),
            r"model\.dense_intermediate_dim: 8 given, but no layers have one MLP .* Remove it",
        ),
    ],
)
def test_invalid_models_are_refused(config, message):
    with pytest.raises(ConfigError) as caught:
        config.check()
    assert re.search(message, str(caught.value)), str(caught.value)


def test_valid_models_pass(tiny):
    for config in (tiny, Gpt2Config(), LlamaConfig(), LlamaConfig(rope=Llama3Rotary())):
        config.check()


def test_yaml_round_trip():
    text = "type: llama\nhidden_dim: 64\nrope: {type: llama3, theta: 500000.0, factor: 32.0}\n"
    config = draccus.decode(ModelConfig, draccus.load(dict, text))
    assert config == LlamaConfig(hidden_dim=64, rope=Llama3Rotary(theta=500000.0, factor=32.0))
    assert draccus.decode(ModelConfig, draccus.encode(config, declared_type=ModelConfig)) == config
    plain = draccus.decode(ModelConfig, {"type": "llama", "rope": {"theta": 1e6}})
    assert plain.rope == DefaultRotary(theta=1e6)


@pytest.mark.parametrize(("before", "now"), [("plain", "reference"), ("blocks", "blockwise"), ("splash", "splash")])
def test_attention_backends_accept_their_names_in_older_checkpoints(before, now):
    assert LlamaConfig(attn_backend=before) == LlamaConfig(attn_backend=now)
    assert LlamaConfig(attn_backend=before).attn_backend == now
