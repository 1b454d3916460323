"""Every family against transformers: logits, gradients, an optimizer step, and import and export round trips."""

import copy
import dataclasses
import json
import tempfile
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import parse_precision
from jaxlm.core.tracing import tracing
from jaxlm.core.values.batch_types import TokenBatch
from jaxlm.interop.hf.family import all_families, family_of_config
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.load import load_weights
from jaxlm.interop.hf.safetensors_file import SafetensorsFile
from jaxlm.models.inference.generate import generate
from jaxlm.objectives.next_token import NextToken
from jaxlm.optim.elementwise import AdamConfig
from jaxlm.optim.groups import parameter_groups
from tests.engine.helpers import one_device
from tests.interop.cases import (
    CASES,
    FIRST,
    LLAMA,
    SEQ_LEN,
    VOCAB,
    abstract_of,
    exported,
    inputs_of,
    logits_of,
    reference,
    state_of,
    tokens,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

by_default = sorted(FIRST.values())
slow = pytest.mark.slow
every = [name if name in by_default else pytest.param(name, marks=slow) for name in CASES]
# Gradients are those of the blocks, which families share: CI computes them where a block, a norm, a router or the order of
# the layers is not yet in another row. Those of recurrent layers are in tests/interop/test_hybrids.py.
WITH_GRADIENTS = (
    *("gpt2", "llama-3", "llama-one-kv-head", "smollm3-irregular", "qwen2_moe-mixed", "mpt-clipped", "olmo_hybrid"),
    *("qwen3_moe", "glm4_moe", "minimax_m2", "granitemoe", "gemma2", "gemma3", "olmo3", "cohere2"),
    *("exaone4", "gpt_neox", "starcoder2", "ministral", "gemma4", "gemma4-moe", "glm4_moe_lite", "gpt_oss"),
)
# Of these, a step of AdamW too: one stack, and two with experts. An optimizer knows nothing else of a family.
STEPPED = ("gpt2", "qwen2_moe-mixed")
few = [name if name in WITH_GRADIENTS else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
rest = [
    pytest.param(name, marks=slow if name in by_default else pytest.mark.soak) for name in CASES if name != "llama-3"
]
# A kind of attention or of positions each; decoding has nothing else that depends on the family. The text of "phi3" grows
# beyond its original length, for which tests/interop/test_longrope.py has tests.
DECODED = (
    "gpt2",
    "mistral",
    "mixtral",
    "olmo2",
    "granite",
    "smollm3",
    "glm4",
    "gpt_neox",
    "mpt",
    "phi3-grows",
    "gemma2",
    "gemma3",
    "gemma4",
    "qwen2_moe-mixed",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "olmo_hybrid",
    "glm4_moe",
    "minimax_m2",
    "olmoe",
    "granitemoe",
    "gpt_oss",
)
# Of the last nine: tests/interop/test_greedy_text.py.
GENERATED = ("llama-3", "gpt2", "gemma3", "mixtral", "mpt", "smollm3", "qwen2_moe-mixed")


def imported(path, where=None):
    opened = open_folder(path)
    return opened, load_model(path, abstract_of(opened.config), opened.config, where or one_device())


def reference_with(path, name, **keys):
    """Saves transformers' model, and changes keys of its config.json."""
    reference(name).save_pretrained(path)
    content = json.loads((path / "config.json").read_text()) | keys
    (path / "config.json").write_text(json.dumps(content))
    return path


def loaded_by_transformers(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def check_logits(model, theirs, ids=None, atol=1e-4):
    ids = tokens() if ids is None else ids
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(logits_of(model, inputs_of(ids)), expected, rtol=1e-4, atol=atol)


def check_not_exported(path, model, config, message):
    with pytest.raises(ConfigError, match=rf"cannot represent this model:\n  {message}"):
        exported(path / "x", model, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", every)
def test_logits(name, tmp_path):
    reference(name).save_pretrained(tmp_path)
    _, model = imported(tmp_path)
    check_logits(model, reference(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys", "note"),
    [
        ("gemma3", {"attn_logit_softcapping": 0.1}, "attn_logit_softcapping: 0.1: transformers does not cap"),
        ("mpt", {"expansion_ratio": 3}, "expansion_ratio: 3: transformers always uses 4"),
        ("gpt2-untied", {"tie_word_embeddings": True}, "lm_head.weight differs from the token embedding"),
        ("llama-own-heads", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5: transformers rotates all"),
    ],
)
def test_what_transformers_does_not_follow_is_noted_and_ignored_too(name, keys, note, tmp_path):
    opened, model = imported(reference_with(tmp_path, name, **keys))
    check_logits(model, loaded_by_transformers(tmp_path))
    assert note in "".join(opened.notes)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma3", lambda config: {"attn_soft_cap": 0.1}, r"model\.attn_soft_cap: 0\.1 would become None"),
        (
            "llama-own-heads",
            lambda config: {"rope": dataclasses.replace(config.rope, partial_rotary_factor=0.5)},
            r"model\.rope",
        ),
    ],
)
def test_what_transformers_does_not_follow_is_not_exported(name, change, message, tmp_path):
    reference(name).save_pretrained(tmp_path)
    opened, model = imported(tmp_path)
    check_not_exported(tmp_path, model, dataclasses.replace(opened.config, **change(opened.config)), message)


def test_mpt_has_four_times_the_width_whatever_the_ratio(tmp_path):
    first, second = (open_folder(reference_with(tmp_path, "mpt", expansion_ratio=ratio)) for ratio in (3, 2.5))
    assert first.config == second.config


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(5, 24), (10, 24, SEQ_LEN)], ids=str)
def test_dynamic_rope_beyond_the_imported_length(lengths, tmp_path):
    """The frequencies depend on the length of the text, and while it grows, cached keys stay as they are."""
    theirs = loaded_by_transformers(reference_with(tmp_path, "llama-dynamic", max_position_embeddings=SEQ_LEN // 3))
    config = dataclasses.replace(open_folder(tmp_path).config, seq_len=SEQ_LEN)
    model = load_model(tmp_path, abstract_of(config), config, one_device())
    for length in lengths:  # ascending: transformers keeps the frequencies of the longest text so far
        check_logits(model, theirs, tokens()[:, :length], atol=1e-5)
    if len(lengths) > 2:
        check_greedy_tokens(model, loaded_by_transformers(tmp_path), torch.tensor(tokens(length=12)))
    exported(tmp_path / "longer", model, config)  # the length from which on frequencies change stays that of the source
    check_logits(model, loaded_by_transformers(tmp_path / "longer"), tokens()[:, : max(lengths)], atol=1e-5)


@eqx.filter_jit
def loss_and_gradient(model, inputs):
    def loss(model):
        logits = model.logits(model.hidden(inputs).final).array
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], inputs.tokens.array[:, 1:])
        return each.mean()

    return eqx.filter_value_and_grad(loss)(model)


def test_every_family_has_a_case():
    of_transformers = (family for family in all_families() if family.modeling is None)  # others: test_dba.py
    assert {kind for family in of_transformers for kind in family.model_types[:1]} == set(FIRST)


def as_ours(theirs, opened, arrays):
    """Torch tensors by the names of a transformers model's state, as a tree with our model's structure. 0 where it has none.

    transformers writes them to a file, because names and shapes in files may differ from those in memory.
    """
    copied = copy.deepcopy(theirs).float()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for key, place in state_of(copied).items():
            place.copy_(arrays[key].detach()) if key in arrays else place.zero_()
        copied.save_pretrained(folder)
        table = family_of_config(opened.config).tensors(opened.config)
        source = SafetensorsFile(Path(folder) / "model.safetensors")
        return load_weights(abstract_of(opened.config), table, source, one_device(), where="torch")


@pytest.mark.slow
@pytest.mark.parametrize("name", few)
def test_gradients(name, tmp_path):
    theirs = copy.deepcopy(reference(name))
    theirs.save_pretrained(tmp_path)
    opened, model = imported(tmp_path)
    loss, gradient = loss_and_gradient(model, inputs_of(tokens()))
    expected = theirs(torch.tensor(tokens()), labels=torch.tensor(tokens())).loss
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)

    wanted = as_ours(theirs, opened, {key: p.grad for key, p in theirs.named_parameters()})
    largest = max(float(jnp.abs(leaf.array).max()) for _, leaf in tree.leaves(wanted))
    for (path, ours), (_, reference_) in zip(tree.leaves(gradient), tree.leaves(wanted), strict=True):
        # A key bias shifts all scores of a query equally, so its gradient is 0: only rounding, on both sides.
        near = 1e-3 * max(float(jnp.abs(reference_.array).max()), 1e-5 * largest)
        np.testing.assert_allclose(ours.array, reference_.array, rtol=1e-3, atol=near, err_msg=path)
    if name in STEPPED:
        check_a_step_of_adamw(theirs, opened, model, wanted)


def check_a_step_of_adamw(theirs, opened, model, gradient):
    rates = {"learning_rate": 1e-3, "weight_decay": 0.1}
    torch.optim.AdamW(theirs.parameters(), 1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1).step()
    config = AdamConfig(**rates, warmup=0, epsilon=1e-5, max_grad_norm=None, weight_decay_modules=["."])
    adam = config.build(parameter_groups(model, config), 10)

    @jax.jit
    def step(model, gradient):
        return optax.apply_updates(model, adam.update(gradient, adam.init(model), model)[0])

    # Both take the same gradient: Adam would divide the small differences between two by gradients near 0.
    stepped = tree.leaves(step(model, gradient))
    for (path, ours), (_, reference_) in zip(
        stepped, tree.leaves(as_ours(theirs, opened, state_of(theirs))), strict=True
    ):
        np.testing.assert_allclose(ours.array, reference_.array, rtol=0, atol=1e-6, err_msg=path)


PAD = 7


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_only_lookups_of_a_pad_token_in_the_text_have_another_gradient(tied, tmp_path):
    """transformers gives them none, even if the token has a meaning. The padding of a batch has none in either."""
    config = {**LLAMA, "pad_token_id": PAD, "tie_word_embeddings": tied}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    with torch.no_grad():
        # It begins as a zero vector. There RMSNorm multiplies gradients, and their rounding errors, by 1 / sqrt(epsilon).
        theirs.model.embed_tokens.weight[PAD].normal_(0, 0.2)
    theirs.save_pretrained(tmp_path)
    theirs = theirs.double()
    opened, model = imported(tmp_path)
    ids = tokens()
    ids[:, 3::5] = PAD

    def of_transformers(end, mask):
        theirs.zero_grad()
        labels = torch.tensor(np.where(np.arange(SEQ_LEN) < end, ids, -100))
        theirs(torch.tensor(ids), attention_mask=torch.tensor(mask), labels=labels).loss.backward()
        return tree.leaves(as_ours(theirs, opened, {key: p.grad for key, p in theirs.named_parameters()}))

    def of_jaxlm(end):
        inputs = inputs_of(np.where(np.arange(SEQ_LEN) < end, ids, 0))
        segments = inputs.segment_ids * hax.named(jnp.arange(SEQ_LEN) < end, inputs.tokens.axes[1])
        targets = hax.named(jnp.roll(inputs.tokens.array, -1, axis=1), inputs.tokens.axes)
        mask = hax.named(jnp.zeros(targets.array.shape).at[:, : end - 1].set(1.0), targets.axes)
        batch = TokenBatch(inputs.tokens, targets, mask, segments, inputs.positions)
        return jax.jit(jax.grad(lambda m: NextToken().terms(m, batch, None, key=None)[0]["loss"].mean()))(model)

    whole, ours = np.ones_like(ids), dict(tree.leaves(of_jaxlm(SEQ_LEN)))
    for path, wanted in of_transformers(SEQ_LEN, whole):
        others = np.arange(VOCAB) != PAD if path == "tokens.weight" else slice(None)
        np.testing.assert_allclose(ours[path].array[others], wanted.array[others], rtol=1e-3, atol=1e-6, err_msg=path)
        if path == "tokens.weight":
            assert tied or not np.asarray(wanted.array[PAD]).any()
            assert np.abs(ours[path].array[PAD] - wanted.array[PAD]).max() > 1e-3
    theirs.model.embed_tokens.padding_idx = None
    for path, wanted in of_transformers(SEQ_LEN, whole):
        np.testing.assert_allclose(ours[path].array, wanted.array, rtol=1e-3, atol=1e-6, err_msg=path)

    end = 33  # PAD fills the rows behind it; our filler is token 0
    ids[:, end:] = PAD
    ids[:, :end][ids[:, :end] == PAD] = 1
    theirs.model.embed_tokens.padding_idx = PAD
    ours = dict(tree.leaves(of_jaxlm(end)))
    for path, wanted in of_transformers(end, (np.arange(SEQ_LEN) < end) * whole):
        np.testing.assert_allclose(ours[path].array, wanted.array, rtol=1e-3, atol=1e-6, err_msg=path)


@slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral"])
def test_second_derivatives(name, tmp_path):
    """Hessian-vector products of the training objective, against torch in float64."""
    theirs = copy.deepcopy(reference(name))
    theirs.save_pretrained(tmp_path)
    opened, model = imported(tmp_path)
    theirs = theirs.double()
    theirs.config._experts_implementation = "eager"  # the default implementation does not support float64
    names, parameters = zip(*theirs.named_parameters(), strict=True)
    generator = torch.Generator().manual_seed(1)
    u = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    expected = theirs(torch.tensor(tokens()), labels=torch.tensor(tokens())).loss
    gradient = torch.autograd.grad(expected, parameters, create_graph=True)
    slope = sum((g * d).sum() for g, d in zip(gradient, u, strict=True))
    along = torch.autograd.grad(slope, parameters, allow_unused=True)
    along = [torch.zeros_like(p) if h is None else h for h, p in zip(along, parameters, strict=True)]

    inputs = inputs_of(tokens())
    targets = hax.named(jnp.roll(inputs.tokens.array, -1, axis=1), inputs.tokens.axes)
    mask = hax.named(jnp.ones(targets.array.shape).at[:, -1].set(0.0), targets.axes)
    batch = TokenBatch(inputs.tokens, targets, mask, inputs.segment_ids, inputs.positions)

    @jax.jit
    def second(model, direction):
        def loss(model):
            with tracing(twice_differentiable=True):
                return NextToken().terms(model, batch, None, key=None)[0]["loss"].mean()

        return jax.jvp(jax.grad(loss), (model,), (direction,))

    first, found = second(model, as_ours(theirs, opened, dict(zip(names, u, strict=True))))
    for ours, torchs in ((first, gradient), (found, along)):
        wanted = tree.leaves(as_ours(theirs, opened, dict(zip(names, torchs, strict=True))))
        largest = max(float(jnp.abs(leaf.array).max()) for _, leaf in wanted)
        for (path, leaf), (_, reference_) in zip(tree.leaves(ours), wanted, strict=True):
            near = 1e-3 * max(float(jnp.abs(reference_.array).max()), 1e-4 * largest)
            np.testing.assert_allclose(leaf.array, reference_.array, rtol=1e-3, atol=near, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", every)
def test_import_and_export_are_bit_for_bit_equal(name, tmp_path):
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "theirs")
    opened, model = imported(tmp_path / "theirs")
    exported(tmp_path / "ours", model, opened.config)
    before, after = (SafetensorsFile(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert before.tensors == after.tensors
    for tensor in before.tensors:
        np.testing.assert_array_equal(before.view(tensor), after.view(tensor), err_msg=tensor)
    saved, again = (transformers.AutoConfig.from_pretrained(tmp_path / side) for side in ("theirs", "ours"))
    free = {"architectures", "dtype", "transformers_version", "_name_or_path", "bos_token_id", "eos_token_id"}
    free |= {
        "pad_token_id",
        "use_cache",
        *(() if getattr(saved, "use_sliding_window", True) else ("max_window_layers",)),
    }
    same = {"gelu_pytorch_tanh": "gelu_new"}  # two names of the same function
    for key, value in saved.to_dict().items():
        written = again.to_dict()[key]
        if isinstance(value, dict):  # values that equal their defaults are also written
            assert value.items() <= written.items(), key
        assert key in free or isinstance(value, dict) or value == written or same.get(str(value)) == written, key
    assert open_folder(tmp_path / "ours").config == opened.config


@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("minimax_m2", marks=slow)])
def test_the_bias_of_a_router_is_float32_in_a_bfloat16_model_and_its_files(name, tmp_path):
    reference(name).save_pretrained(tmp_path / "theirs")
    opened = open_folder(tmp_path / "theirs")
    shapes = jax.eval_shape(parse_precision("bf16").cast_to_params, abstract_of(opened.config))
    model = load_model(tmp_path / "theirs", shapes, opened.config, one_device())
    exported(tmp_path / "ours", model, opened.config, dtype=jnp.bfloat16)
    before, after = (SafetensorsFile(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    biases = [tensor for tensor in after.tensors if tensor.endswith("correction_bias")]
    assert biases
    assert after.tensors["model.embed_tokens.weight"].dtype == jnp.bfloat16
    for tensor in biases:
        assert after.tensors[tensor].dtype == np.float32
        np.testing.assert_array_equal(after.view(tensor), before.view(tensor))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3", *rest])
def test_transformers_computes_the_same_with_an_exported_model(name, tmp_path):
    """Identical logits, and for some models 32 greedy tokens, which our own cached decoding also chooses."""
    reference(name).save_pretrained(tmp_path / "theirs")
    opened, model = imported(tmp_path / "theirs")
    exported(tmp_path / "ours", model, opened.config)
    again = loaded_by_transformers(tmp_path / "ours")
    prompt = torch.tensor(tokens(rows=2, length=12))
    with torch.no_grad():
        assert torch.equal(again(prompt).logits, reference(name)(prompt).logits)
    if name in GENERATED:
        check_greedy_tokens(model, again, prompt)


def check_greedy_tokens(model, theirs, prompt):
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = theirs.generate(prompt, **options)[:, 12:]
    assert generate(model, prompt.tolist(), max_new_tokens=32, temperature=0.0) == expected.tolist()


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in CASES if name not in GENERATED])
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    reference(name).save_pretrained(tmp_path)
    _, model = imported(tmp_path)
    check_greedy_tokens(model, reference(name), torch.tensor(tokens(rows=2, length=12)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow if name in DECODED else pytest.mark.soak)
        for name in CASES
        # A token's state depends on those after it, which the cache does not.
        if name != "phi3" and "bidirectional" not in name
    ],
)
def test_cached_decoding_equals_the_full_forward_pass(name, tmp_path):
    reference(name).save_pretrained(tmp_path)
    opened, model = imported(tmp_path)
    whole = inputs_of(tokens())
    expected = logits_of(model, whole)
    cache = model.init_cache(Axis("batch", 2), opened.config.seq_len, jnp.float32)

    @jax.jit
    def step(inputs, cache):
        hidden = model.hidden(inputs, cache=cache)
        return model.logits(hidden.final).array, hidden.cache

    got = []
    # Two compiled steps: 16 tokens into an empty cache and again behind 26 tokens, and one token at a time.
    for start, stop in [
        (0, 16),
        *((i, i + 1) for i in range(16, 26)),
        (26, 42),
        *((i, i + 1) for i in range(42, SEQ_LEN)),
    ]:
        part = inputs_of(tokens(), slice(start, stop))
        logits, cache = step(part, cache)
        got.append(logits)
    np.testing.assert_allclose(np.concatenate(got, axis=1), expected, rtol=1e-4, atol=1e-4)
