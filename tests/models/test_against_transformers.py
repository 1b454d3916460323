"""Logits and gradients against the reference implementations, with the same random weights."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.base import vocab_axis
from jaxlm.models.gpt2 import Gpt2Config
from jaxlm.models.llama import LlamaConfig
from jaxlm.models.rotary import DefaultRotary, Llama3Rotary

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, HEADS, DIM, LAYERS = 61, 4, 32, 2
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def randomised(reference):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return reference.eval()


def gpt2_leaves(model, read):
    """(named array of the model, the same numbers read off the reference) for every parameter."""
    block, size = model.body.layers.stacked, DIM // HEADS

    def layer(name, reshape=np.asarray):
        return np.stack([reshape(read(f"transformer.h.{i}.{name}")) for i in range(LAYERS)])

    yield model.tokens.weight, read("transformer.wte.weight")
    yield model.positions.weight, read("transformer.wpe.weight")
    yield model.body.final_norm.weight, read("transformer.ln_f.weight")
    yield model.body.final_norm.bias, read("transformer.ln_f.bias")
    for norm, name in ((block.attn_norm, "ln_1"), (block.mlp_norm, "ln_2")):
        yield norm.weight, layer(f"{name}.weight")
        yield norm.bias, layer(f"{name}.bias")
    for i, projection in enumerate((block.attn.q_proj, block.attn.k_proj, block.attn.v_proj)):
        part = slice(i * DIM, (i + 1) * DIM)
        yield projection.weight, layer("attn.c_attn.weight", lambda a, p=part: a[:, p].T.reshape(HEADS, size, DIM))
        yield projection.bias, layer("attn.c_attn.bias", lambda a, p=part: a[p].reshape(HEADS, size))
    yield block.attn.o_proj.weight, layer("attn.c_proj.weight", lambda a: a.T.reshape(DIM, HEADS, size))
    yield block.attn.o_proj.bias, layer("attn.c_proj.bias")
    for projection, name in ((block.mlp.up_proj, "mlp.c_fc"), (block.mlp.down_proj, "mlp.c_proj")):
        yield projection.weight, layer(f"{name}.weight", np.transpose)
        yield projection.bias, layer(f"{name}.bias")


def llama_leaves(model, read):
    """(named array of the model, the same numbers read off the reference) for every parameter."""
    block, size = model.body.layers.stacked, DIM // HEADS

    def layer(name, reshape=np.asarray):
        return np.stack([reshape(read(f"model.layers.{i}.{name}.weight")) for i in range(LAYERS)])

    yield model.tokens.weight, read("model.embed_tokens.weight")
    yield model.body.final_norm.weight, read("model.norm.weight")
    if model.head is not None:
        yield model.head.weight, read("lm_head.weight")
    yield block.attn_norm.weight, layer("input_layernorm")
    yield block.mlp_norm.weight, layer("post_attention_layernorm")
    for name in ("q_proj", "k_proj", "v_proj"):
        yield getattr(block.attn, name).weight, layer(f"self_attn.{name}", lambda a: a.reshape(-1, size, DIM))
    yield block.attn.o_proj.weight, layer("self_attn.o_proj", lambda a: a.reshape(DIM, HEADS, size))
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield getattr(block.mlp, name).weight, layer(f"mlp.{name}")


def with_weights_of(config, leaves, reference):
    model = jax.eval_shape(lambda key: config.build(vocab_axis(VOCAB), key=key), jax.random.key(0))
    state = {name: tensor.detach().numpy() for name, tensor in reference.state_dict().items()}
    numbers = {id(leaf): value for leaf, value in leaves(model, state.__getitem__)}

    def place(leaf):
        value = jnp.asarray(numbers.pop(id(leaf)))
        assert value.shape == leaf.array.shape
        return hax.NamedArray(value, leaf.axes)

    model = jax.tree.map(place, model, is_leaf=lambda a: isinstance(a, hax.NamedArray))
    assert not numbers
    return model


def assert_same(model, reference, leaves, as_inputs, seq_len):
    tokens = np.random.default_rng(1).integers(0, VOCAB, size=(2, seq_len))
    weights = np.random.default_rng(2).normal(size=(2, seq_len, VOCAB)).astype(np.float32) / seq_len
    inputs = as_inputs(tokens)

    @eqx.filter_jit
    def logits_and_gradient(model):
        def scalar(model):
            logits = model.logits(model.hidden(inputs).final).array
            return (logits * weights).sum(), logits

        (_, logits), gradient = eqx.filter_value_and_grad(scalar, has_aux=True)(model)
        return logits, gradient

    logits, gradient = logits_and_gradient(model)
    expected = reference(torch.tensor(tokens)).logits
    np.testing.assert_allclose(logits, expected.detach().numpy(), **NEAR)
    (expected * torch.tensor(weights)).sum().backward()
    grads = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}
    compared = 0
    for got, want in leaves(gradient, grads.__getitem__):
        np.testing.assert_allclose(got.array, want, **NEAR)
        compared += 1
    assert compared == len(jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
        pytest.param({"activation_function": "relu"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gpt2(options, as_inputs):
    reference_config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=24,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        attn_implementation="eager",
        **options,
    )
    reference = randomised(transformers.GPT2LMHeadModel(reference_config))
    config = Gpt2Config(seq_len=24, hidden_dim=DIM, num_layers=LAYERS, num_heads=HEADS, **options)
    model = with_weights_of(config, gpt2_leaves, reference)
    assert_same(model, reference, gpt2_leaves, as_inputs, 24)


LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("num_kv_heads", "tied", "rope"),
    [
        (4, True, DefaultRotary(theta=100.0)),
        (2, False, DefaultRotary(theta=100.0)),
        pytest.param(1, True, DefaultRotary(theta=100.0), marks=pytest.mark.slow),
        (2, False, Llama3Rotary(theta=100.0, **LLAMA3)),
    ],
    ids=str,
)
def test_llama(num_kv_heads, tied, rope, as_inputs):
    scaled = isinstance(rope, Llama3Rotary)
    rope_parameters = {
        "rope_theta": rope.theta,
        "rope_type": "llama3" if scaled else "default",
        **(LLAMA3 if scaled else {}),
    }
    reference_config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=rope_parameters,
        attn_implementation="eager",
    )
    reference = randomised(transformers.LlamaForCausalLM(reference_config))
    config = LlamaConfig(
        seq_len=48,
        hidden_dim=DIM,
        intermediate_dim=48,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=num_kv_heads,
        tie_word_embeddings=tied,
        rope=rope,
    )
    model = with_weights_of(config, llama_leaves, reference)
    assert_same(model, reference, llama_leaves, as_inputs, 48)
