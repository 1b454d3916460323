"""cuDNN attention without a GPU: the kernel calls in programs lowered for CUDA, and the use of the results, with a stand-in
that does what cuDNN's documentation specifies and writes NaN where it specifies nothing.
"""

import functools
import re
from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.devices import cuda_capability
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.models.attention import choose as choice
from jaxlm.models.attention import selftest
from jaxlm.models.attention.api import AttentionMask, AttentionSpec, attention
from jaxlm.models.attention.backends.blockwise import blockwise_attention
from jaxlm.models.attention.backends.cudnn import (
    DOCUMENTS_PER_CALL,
    are_single_documents,
    cudnn_attention,
    document_indices,
    lengths_and_offsets,
)
from jaxlm.models.attention.choose import AttentionChoice, AttentionTask, choose_attention
from jaxlm.models.attention.selftest import (
    AttentionShape,
    disagreement,
    packed_rows,
    selftest_problem,
    single_document_rows,
)
from jaxlm.models.attention.sharding import AttentionSharding
from jaxlm.models.base import vocab_axis
from jaxlm.models.mixers.attention import SelfAttention
from jaxlm.models.stacks import Stack
from tests.engine.helpers import layout
from tests.models import cudnn_stand_in
from tests.tiers import one_of

fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
F32 = AttentionShape(jnp.float32, head_size=8, group=2, windowed=False)


@pytest.fixture
def for_cuda(monkeypatch):
    """Lowers a function as on a Hopper GPU with a recent cuDNN."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda _: False)
    return lambda fun, *args: jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """(kernel, mask, documents per row, window) of every cuDNN call in a program."""
    for line in text.splitlines():
        if kernel := re.search(r"@__cudnn\$(\w+)", line):
            plain = line.replace("\\22", "").replace('\\"', "")
            value = lambda name, plain=plain: re.search(rf"{name}: (\w+)", plain)[1]  # noqa: E731
            yield kernel[1], value("mask_type"), int(value("max_seg_per_batch")), int(value("sliding_window_length"))


def gradients(attend):
    return jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (24, True), (None, False)])
def test_the_program_calls_the_kernels(for_cuda, packed, window, causal):
    q, k = (jnp.zeros((2, 64, 2, *shape), jnp.bfloat16) for shape in ((3, 64), (64,)))
    attend = functools.partial(cudnn_attention, scale=0.1, window=window, packed=packed, causal=causal)
    found = set(calls(for_cuda(gradients(attend), q, k, k, jnp.ones((2, 64), jnp.int32))))
    forward, backward = "fmhaSoftmax", "fmhaSoftmaxBackward"
    whole, padding = ("CAUSAL", "PADDING_CAUSAL") if causal else ("NO_MASK", "PADDING")
    expected = {(kernel, whole, 1, window or 0) for kernel in (forward, backward)}
    if packed:
        expected |= {(kernel, padding, DOCUMENTS_PER_CALL, window or 0) for kernel in (forward, backward)}
    assert found == expected


def test_each_device_calls_it_for_its_own_rows_and_heads(for_cuda, monkeypatch):
    monkeypatch.setattr("jaxlm.models.attention.api.choose_attention", lambda *_: AttentionChoice("cudnn", ""))

    def attend(q, k, segments):
        rows = hax.named(segments, ("batch", "position"))
        attention_mask = AttentionMask(
            rows, rows, *(a.rename({"position": "key_position"}) for a in (rows, rows)), True
        )
        axes = ("batch", "key_position", "kv_heads", "head_size")
        q, k = hax.named(q, ("batch", "position", "heads", "head_size")), hax.named(k, axes)
        spec = AttentionSpec(attention_mask, sharding=AttentionSharding.of(q, k))
        return attention(q, k, k, spec).array

    q, k = jnp.zeros((8, 64, 4, 16), jnp.bfloat16), jnp.zeros((8, 64, 2, 16), jnp.bfloat16)
    with layout(model=2).use():
        text = for_cuda(attend, q, k, jnp.ones((8, 64), jnp.int32))
    assert "@__cudnn$fmhaSoftmax" in text
    operands = re.findall(r"@__cudnn\$fmhaSoftmax\(.*\) -> \(?tensor<([\dx]+)xbf16>", text)
    assert set(operands) == {"2x2x64x16"}  # 8 rows over 4 devices and 4 heads over 2


def test_lengths_and_offsets_match_numpy():
    segments = packed_rows()
    documents = np.asarray(document_indices(jnp.asarray(segments)))
    for row, found in zip(segments, documents, strict=True):
        assert (found >= 0).tolist() == (row != 0).tolist()
        ids = [s for s in dict.fromkeys(row.tolist()) if s]
        assert [ids[i] for i in found if i >= 0] == [s for s in row.tolist() if s]
    for first in (0, DOCUMENTS_PER_CALL, 2 * DOCUMENTS_PER_CALL):
        lengths, offsets = map(np.asarray, lengths_and_offsets(jnp.asarray(documents), first))
        assert lengths.dtype == offsets.dtype == np.int32
        for row, length, offset in zip(segments, lengths, offsets, strict=True):
            ids = [s for s in dict.fromkeys(row.tolist()) if s][first : first + DOCUMENTS_PER_CALL]
            fill = [-1] * (DOCUMENTS_PER_CALL - len(ids))
            assert length.tolist() == [int((row == s).sum()) for s in ids] + fill
            assert offset.tolist() == [int((row == s).argmax()) for s in ids] + fill + [-1]


def test_the_self_tests_rows_cover_their_cases():
    assert all(bool(are_single_documents(jnp.asarray(row[None]))) for row in single_document_rows())
    counts = [len(set(row) - {0}) for row in packed_rows().tolist()]
    assert {0, 1, 2, DOCUMENTS_PER_CALL, DOCUMENTS_PER_CALL + 3} <= set(counts)
    assert max(counts) > 2 * DOCUMENTS_PER_CALL
    assert not are_single_documents(jnp.asarray([[0, 1, 1]]))
    assert not are_single_documents(jnp.asarray([[1, 1, 2]]))


# --- With a stand-in for the kernel -----------------------------------------------------------------------------------


@pytest.fixture
def stood_in(monkeypatch):
    cudnn_stand_in.install(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed", "windowed", "causal", "rows"),
    one_of(
        [
            (True, True, True, packed_rows),
            (False, True, True, single_document_rows),
            (True, False, False, packed_rows),
            (False, False, False, single_document_rows),
            (True, False, True, single_document_rows),
            (True, False, True, packed_rows),
            (True, True, True, single_document_rows),
            (False, True, True, packed_rows),
            (True, False, False, single_document_rows),
            (True, False, False, lambda: np.ones((2, 256), np.int32)),
        ],
        but=4,
    ),
)
@pytest.mark.usefixtures("stood_in")
def test_matches_reference_attention(monkeypatch, rows, packed, windowed, causal):
    monkeypatch.setattr(selftest, "TOLERANCE", 1e-5)
    shape = AttentionShape(jnp.float32, head_size=8, group=2, windowed=windowed, causal=causal)
    options = {"window": shape.window, "packed": packed, "causal": causal}
    attend = functools.partial(cudnn_attention, scale=shape.scale, **options)
    assert disagreement(attend, rows(), shape) is None


# --- The self-test ----------------------------------------------------------------------------------------------------


def reference(q, k, v, segments):
    return blockwise_attention(q, k, v, segments, F32.scale, None)


def leaking(q, k, v, segments):
    """A wrong kernel: every document sees the earlier ones in its row."""
    return jnp.where((segments != 0)[:, :, None, None, None], reference(q, k, v, jnp.ones_like(segments)), 0)


def one_document_wrong(q, k, v, segments):
    return reference(q, k, v, segments) * jnp.where(segments == 5, 1.1, 1.0)[:, :, None, None, None]


@jax.custom_vjp
def wrong_gradient(q, k, v, segments):
    return reference(q, k, v, segments)


wrong_gradient.defvjp(
    lambda *args: (reference(*args), args),
    lambda args, d_out: (
        *(g * s for g, s in zip(jax.vjp(reference, *args)[1](d_out), (1, 0.9, 1), strict=False)),
        None,
    ),
)


def undefined(q, k, v, segments):
    return reference(q, k, v, segments) + jnp.where(segments == 3, jnp.nan, 0.0)[:, :, None, None, None]


def dirty_padding(q, k, v, segments):
    return reference(q, k, v, segments) + jnp.where(segments == 0, 1.0, 0.0)[:, :, None, None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attend", "found"),
    [
        (reference, None),
        (leaking, "output differs from reference attention by"),
        (one_document_wrong, "output differs from reference attention by 10.0%"),
        (wrong_gradient, "gradient of keys differs from reference attention by 10.0%"),
        (undefined, "output differs from reference attention by nan%"),
        (dirty_padding, "output differs from reference attention by inf%"),
    ],
)
def test_the_self_test_finds_a_wrong_kernel(attend, found):
    error = disagreement(attend, packed_rows(), F32)
    assert error is None if found is None else found in error


@pytest.mark.slow
def test_bfloat16_is_within_the_tolerance():
    shape = AttentionShape(jnp.bfloat16, head_size=64, group=2, windowed=True)
    attend = lambda q, k, v, s: blockwise_attention(q, k, v, s, shape.scale, shape.window)  # noqa: E731
    assert disagreement(attend, packed_rows(), shape) is None


def test_a_kernel_that_raises_fails_the_self_test():
    def broken():
        raise NotImplementedError("no such\nkernel")

    assert selftest_problem(lambda: None) is None
    assert selftest_problem(lambda: "off") == "its self-test failed: off"
    assert selftest_problem(broken) == "its self-test failed: NotImplementedError: no such"


def test_two_layers_in_a_program_are_part_of_the_self_test():
    """XLA runs one deterministic backward call of cuDNN, and raises this for the second (openxla/xla#46500)."""
    calls, fast = [], jax.jit(reference)

    def attend(q, k, v, segments):
        calls.append(isinstance(q, jax.core.Tracer))
        if calls.count(True) > 2:  # one for the gradients of a single layer, so this is the second of two layers
            raise IndexError("absl::container_internal::raw_hash_map<>::at")
        return fast(q, k, v, segments)

    found = selftest_problem(lambda: disagreement(attend, packed_rows(), F32))
    assert found == "its self-test failed: IndexError: absl::container_internal::raw_hash_map<>::at"


# --- The choice -------------------------------------------------------------------------------------------------------

HOPPER = {"platform": "gpu", "dtype": jnp.dtype(jnp.bfloat16), "seq_len": 1024, "head_size": 128, "capability": (9, 0)}


@pytest.fixture
def tested(monkeypatch):
    """Stand-ins for the results of the self-tests of single and of packed documents."""

    def say(whole, packed):
        monkeypatch.setattr(choice, "selftest_cudnn", lambda _, **kind: packed if kind["packed"] else whole)

    say(None, None)
    return say


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        ({}, "cudnn", ""),
        ({"capability": (8, 0)}, "cudnn_rows", "packed documents need compute capability 9.0"),
        ({"capability": (7, 5)}, "blockwise", "compute capability 8.0 or higher"),
        ({"capability": None}, "blockwise", "needs an NVIDIA device"),
        ({"dtype": jnp.dtype(jnp.float32)}, "blockwise", "it does not support float32"),
        ({"head_size": 256}, "cudnn", ""),
        ({"head_size": 256, "capability": (8, 6)}, "blockwise", "head size 256 is not a multiple of 8 up to 128"),
        ({"head_size": 60}, "blockwise", "head size 60"),
        ({"seq_len": 1001}, "blockwise", "seq_len 1001"),
        ({"dropout": 0.1}, "reference", "attention dropout"),
        ({"causal": False}, "cudnn", ""),
        ({"causal": False, "window": 64}, "blockwise", "its windows look only back"),
        ({"same_tokens": False}, "reference", "not the same tokens"),
    ],
)
@pytest.mark.usefixtures("tested")
def test_choice(change, name, why):
    found = choose_attention(AttentionTask(**(HOPPER | change)))
    assert (found.name, found.degraded) == (name, bool(why))
    assert why in found.reason


def test_a_kernel_that_fails_its_self_test_is_not_chosen(tested):
    task = AttentionTask(**HOPPER)
    tested(None, "packed is wrong")
    assert choose_attention(task).name == "cudnn_rows"
    assert "packed is wrong" in choose_attention(task).reason
    tested("all is wrong", None)
    assert (choose_attention(task).name, choose_attention(task).degraded) == ("blockwise", True)


def test_without_a_gpu_the_choice_falls_back_to_blockwise():
    found = choose_attention(AttentionTask(**HOPPER))
    assert found.name == "blockwise"
    assert "no GPU is attached" in found.reason


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(hidden_dim=64, num_heads=8, num_kv_heads=2, sliding_window=24), (jnp.bfloat16, 8, 4, 24, 0.0)),
        (Gpt2Config(hidden_dim=64, num_heads=4, upcast_attn=True, attn_pdrop=0.1), (jnp.float32, 16, 1, None, 0.1)),
    ],
)
def test_a_layer_describes_its_attention_task(config, expected):
    built = jax.eval_shape(lambda: config.build(vocab_axis(16), key=jax.random.key(0)))
    (layer,), (body,) = tree.modules(built, SelfAttention), tree.modules(built, Stack)
    (kind,) = body.kinds
    task = layer.task("gpu", (9, 0), jnp.dtype(jnp.bfloat16), 1024, kind.window)
    assert (task.platform, task.capability, task.seq_len, task.same_tokens) == ("gpu", (9, 0), 1024, True)
    assert (task.dtype, task.head_size, task.group, task.window, task.dropout) == expected


@pytest.mark.parametrize(("given", "found"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("gfx90a", None)])
def test_capability(given, found):
    assert cuda_capability(SimpleNamespace(compute_capability=given)) == found
    assert cuda_capability(SimpleNamespace()) is None
