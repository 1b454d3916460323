"""The roofline of compiled programs, against operations and bytes counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxlm.hardware.hlo import HostCopy
from jaxlm.hardware.topologies import Speed
from jaxlm.systems.forecast.roofline import Seconds, executed_flops, host_traffic, overlapped, roofline

FLOPS_ONLY = Speed(products=1.0, attention=1.0, memory=float("inf"))
BYTES_ONLY = Speed(products=float("inf"), attention=float("inf"), memory=1.0)


def compiled(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()


def test_matrix_products_are_multiplied_by_their_loops_trip_count():
    def chain(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    found = roofline(compiled(chain, (64, 32), (32, 32)), FLOPS_ONLY)
    assert found == Seconds(products=7 * 2 * 64 * 32 * 32)


def test_elementwise_work_reads_and_writes_each_array_once():
    found = roofline(compiled(lambda x, y: jnp.sin(x) * y + 1, (256, 128), (256, 128)), BYTES_ONLY)
    assert found == Seconds(memory=3 * 4 * 256 * 128)


HEADER = """HloModule m

%cut (p: f32[24,100], i: s32[]) -> f32[1,100] {
  %p = f32[24,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = f32[1,100]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,100}
}

%keep (stack: f32[24,100], row: f32[1,100], at: s32[]) -> f32[24,100] {
  %stack = f32[24,100]{1,0} parameter(0)
  %row = f32[1,100]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %u = f32[24,100]{1,0} dynamic-update-slice(%stack, %row, %at, %none)
}
"""


def test_a_slice_of_a_stack_counts_only_its_own_bytes():
    text = f"""{HEADER}
ENTRY %main (s: f32[24,100], j: s32[]) -> f32[24,100] {{
  %s = f32[24,100]{{1,0}} parameter(0)
  %j = s32[] parameter(1)
  %a = f32[1,100]{{1,0}} fusion(%s, %j), kind=kLoop, calls=%cut
  ROOT %b = f32[24,100]{{1,0}} fusion(%s, %a, %j), kind=kLoop, calls=%keep
}}
"""
    assert roofline(text, BYTES_ONLY) == Seconds(memory=(2 * 400 + 4) + (2 * 400 + 4))


def test_an_asynchronous_fusion_counts_once():
    text = f"""{HEADER}
ENTRY %main (s: f32[24,100], r: f32[1,100], j: s32[]) -> f32[24,100] {{
  %s = f32[24,100]{{1,0}} parameter(0)
  %r = f32[1,100]{{1,0}} parameter(1)
  %j = s32[] parameter(2)
  %a = ((f32[24,100], f32[1,100], s32[]), f32[24,100], u32[]) fusion-start(%s, %r, %j), kind=kLoop, calls=%keep
  ROOT %b = f32[24,100]{{1,0}} fusion-done(%a)
}}
"""
    assert roofline(text, BYTES_ONLY) == Seconds(memory=2 * 400 + 4)


ATTENTION = (
    'custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax{kind}", backend_config={{"intermediate_tensor_shape":'
    ' {{"element_type": "BF16", "dimensions": ["2", "8", "64", "64"], "tuple_shapes": []}}, "mask_type": "CAUSAL",'
    ' "bmm1_dot_dimension_numbers": {{"lhs_contracting_dimensions": ["3"]}}}}'
)


@pytest.mark.parametrize(
    ("num_keys", "rate"), [(512, 400.0), (4096, 400.0), (8192, 480.0), (16384, 560.0), (1 << 20, 560.0)]
)
def test_attention_to_more_keys_is_faster(num_keys, rate):
    line = ATTENTION.format(kind="").replace('"64", "64"', f'"64", "{num_keys}"')
    text = f"""HloModule m

ENTRY %main (q: bf16[2,64,8,16], k: bf16[2,{num_keys},2,16]) -> bf16[2,64,8,16] {{
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,{num_keys},2,16]{{3,2,1,0}} parameter(1)
  ROOT %f = bf16[2,64,8,16]{{3,2,1,0}} {line}
}}
"""
    flops = 4 * (2 * 8 * 64 * num_keys) * 16 / 2
    assert roofline(text, Speed(1.0, 400.0, 1.0, 560.0)) == Seconds(attention=pytest.approx(flops / rate))


@pytest.mark.parametrize(
    ("window", "tiles"), [(128, 1 + 31 * 2), (129, 1 + 31 * 2), (130, 1 + 2 + 30 * 3), (4096, 512)]
)
@pytest.mark.parametrize(("kind", "passes"), [("", 1), ("Backward", 2.5)])
def test_attention_with_a_window_counts_the_tiles_that_it_touches(window, tiles, kind, passes):
    line = ATTENTION.format(kind=kind).replace('"64", "64"', '"4096", "4096"')
    text = f"""HloModule m

ENTRY %main (q: bf16[2,4096,8,16], k: bf16[2,4096,2,16]) -> bf16[2,4096,8,16] {{
  %q = bf16[2,4096,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,4096,2,16]{{3,2,1,0}} parameter(1)
  ROOT %f = bf16[2,4096,8,16]{{3,2,1,0}} {line.replace('"mask_type"', f'"sliding_window_length": {window}, "mask_type"')}
}}
"""
    assert roofline(text, FLOPS_ONLY) == Seconds(attention=passes * 4 * (2 * 8 * tiles * 128**2) * 16)
    assert roofline(text, BYTES_ONLY) == Seconds(attention=2 * 2 * 4096 * (8 + 2 + 2 + 8) * 16), "the longer of both"


def test_attention_and_choices():
    text = f"""HloModule m

%whole (q: bf16[2,64,8,16]) -> bf16[2,64,8,16] {{
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,64,2,16]{{3,2,1,0}} constant(0)
  ROOT %f = bf16[2,64,8,16]{{3,2,1,0}} {ATTENTION.format(kind="")}
}}

%turn (q: bf16[2,64,8,16]) -> bf16[2,64,8,16] {{
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,64,2,16]{{3,2,1,0}} constant(0)
  ROOT %f = bf16[2,64,8,16]{{3,2,1,0}} {ATTENTION.format(kind="Backward")}
}}

%again (q: bf16[2,64,8,16]) -> pred[] {{
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(0)
  ROOT %more = pred[] constant(true)
}}

%several (q: bf16[2,64,8,16]) -> bf16[2,64,8,16] {{
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(0)
  ROOT %loop = bf16[2,64,8,16]{{3,2,1,0}} while(%q), condition=%again, body=%turn
}}

ENTRY %main (p: pred[], q: bf16[2,64,8,16]) -> bf16[2,64,8,16] {{
  %p = pred[] parameter(0)
  %q = bf16[2,64,8,16]{{3,2,1,0}} parameter(1)
  ROOT %c = bf16[2,64,8,16]{{3,2,1,0}} conditional(%p, %q, %q), true_computation=%several, false_computation=%whole
}}
"""
    causal = 2 * 2 * (2 * 8 * 64 * 64) * 16 / 2
    assert roofline(text, FLOPS_ONLY) == Seconds(attention=causal), "the branch whose length is known"
    backward = text.replace(
        "true_computation=%several, false_computation=%whole", "branch_computations={%turn, %whole}"
    )
    assert roofline(backward, FLOPS_ONLY) == Seconds(attention=2.5 * causal), "the longer one"
    bidirectional = text.replace('"mask_type": "CAUSAL"', '"mask_type": "NO_MASK"')
    assert roofline(bidirectional, FLOPS_ONLY) == Seconds(attention=2 * causal)


def test_slow_memory_limits_matrix_products():
    text = compiled(lambda x, w: x @ w, (8, 1024), (1024, 1024))
    quick, slow = (roofline(text, Speed(1e12, 1e12, memory)).products for memory in (1e15, 1e9))
    assert quick == pytest.approx(2 * 8 * 1024 * 1024 / 1e12)
    assert slow == pytest.approx(4 * (2 * 8 * 1024 + 1024 * 1024) / 1e9)


def test_collectives_run_in_sequence_and_overlap_the_kernels_scheduled_between_start_and_done():
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %first = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), dimensions={0}
  %second = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), dimensions={0}
  %a = f32[100]{0} negate(%x)
  %early = f32[32]{0} all-gather-done(%first)
  %b = f32[10]{0} negate(%x)
  %late = f32[64]{0} all-gather-done(%second)
  %c = f32[1000]{0} negate(%x)
  ROOT %alone = f32[32]{0} all-gather(%x), dimensions={0}
}
"""
    beside_a, beside_b = 4 * (100 + 8), 4 * (10 + 8)
    by_bytes = {128: 100.0, 256: 1000.0}
    seconds = lambda instruction: sum(by_bytes[one.num_bytes] for one in instruction.collectives())  # noqa: E731
    hidden = lambda: [one.hidden for one in overlapped(text, BYTES_ONLY, seconds)]  # noqa: E731
    assert sum(hidden()) == beside_a + beside_b, "the second is longer than all that runs beside it"
    by_bytes[256] = 350.0
    assert hidden() == [100, 350, 0], "both are over before their ends are asked for; nothing runs beside the last"
    assert [one.seconds for one in overlapped(text, BYTES_ONLY, seconds)] == [100, 350, 100]


def test_products_in_fp8_take_half_as_long():
    def text(dtype):
        return f"""HloModule m

ENTRY %main (x: {dtype}[64,32], y: {dtype}[32,16]) -> f32[64,16] {{
  %x = {dtype}[64,32]{{1,0}} parameter(0)
  %y = {dtype}[32,16]{{1,0}} parameter(1)
  ROOT %d = f32[64,16]{{1,0}} dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""

    expected = Seconds(products=2 * 64 * 32 * 16)
    assert roofline(text("bf16"), FLOPS_ONLY) == expected
    assert roofline(text("f8e4m3fn"), FLOPS_ONLY) == Seconds(products=expected.products / 2)
    assert roofline(text("f8e5m2"), BYTES_ONLY).total == 64 * 32 + 32 * 16 + 4 * 64 * 16


def test_a_named_scope_is_counted_alone():
    def step(x, w):
        y = jnp.tanh(x @ w)
        with jax.named_scope("optimizer"):
            return jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), y, length=5)[0]

    text = compiled(step, (64, 32), (32, 32))
    one = 2 * 64 * 32 * 32
    assert roofline(text, FLOPS_ONLY, "optimizer") == Seconds(products=5 * one)
    assert (executed_flops(text, "optimizer"), executed_flops(text)) == (5 * one, 6 * one)
    assert executed_flops(text, "optim") == 0, "a scope's whole name"


def test_a_fusion_without_a_name_belongs_to_the_scope_of_its_contents():
    text = """HloModule m

%contents (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  ROOT %n = f32[100]{0} negate(%p), metadata={op_name="jit(step)/optimizer/neg"}
}

ENTRY %main (x: f32[100]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %a = f32[100]{0} fusion(%x), kind=kLoop, calls=%contents
  %b = f32[100]{0} fusion(%a), kind=kLoop, calls=%contents, metadata={op_name="jit(step)/loss/neg"}
  ROOT %c = f32[100]{0} sine(%b)
}
"""
    assert roofline(text, BYTES_ONLY) == Seconds(memory=3 * 800)
    assert roofline(text, BYTES_ONLY, "optimizer") == Seconds(memory=800)


def test_copies_to_the_host_overlap_the_kernels_scheduled_between_start_and_done():
    """In a loop of five turns, forms that XLA gives them: a slice of a stack in the host's memory, and a whole array."""
    text = """HloModule m, is_scheduled=true

%store (s: f32[5,100], u: f32[1,100], i: s32[]) -> f32[5,100] {
  %s = f32[5,100]{1,0:S(5)} parameter(0)
  %u = f32[1,100]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[5,100]{1,0:S(5)} dynamic-update-slice(%s, %u, %i, %i)
}

%load (s.1: f32[5,100], i.1: s32[]) -> f32[1,100] {
  %s.1 = f32[5,100]{1,0:S(5)} parameter(0)
  %i.1 = s32[] parameter(1)
  %l = f32[1,100]{1,0} dynamic-slice(%s.1, %i.1, %i.1), dynamic_slice_sizes={1,100}
  ROOT %c = f32[1,100]{1,0} copy(%l)
}

%body (t: (s32[], f32[1,100], f32[5,100])) -> (s32[], f32[1,100], f32[5,100]) {
  %t = (s32[], f32[1,100]{1,0}, f32[5,100]{1,0:S(5)}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %x = f32[1,100]{1,0} get-tuple-element(%t), index=1
  %on_host = f32[5,100]{1,0:S(5)} get-tuple-element(%t), index=2
  %there = ((STACK, f32[1,100]{1,0}, s32[]), STACK, u32[]) fusion-start(%on_host, %x, %n), kind=kCustom, calls=%store
  %y = f32[1,100]{1,0} negate(%x)
  %stored = f32[5,100]{1,0:S(5)} fusion-done(%there)
  %back = ((STACK, s32[]), f32[1,100]{1,0}, u32[]) fusion-start(%on_host, %n), kind=kCustom, calls=%load
  %loaded = f32[1,100]{1,0} fusion-done(%back)
  ROOT %out = (s32[], f32[1,100]{1,0}, f32[5,100]{1,0:S(5)}) tuple(%n, %y, %stored)
}

ENTRY %main (t.2: (s32[], f32[1,100], f32[5,100])) -> (s32[], f32[1,100], f32[5,100]) {
  %t.2 = (s32[], f32[1,100]{1,0}, f32[5,100]{1,0:S(5)}) parameter(0)
  %w = f32[7]{0} constant({...})
  %copied = (f32[7]{0:S(5)}, f32[7]{0}, u32[]) copy-start(%w)
  %copy = f32[7]{0:S(5)} copy-done(%copied)
  ROOT %loop = (s32[], f32[1,100]{1,0}, STACK) while(%t.2), body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
""".replace("STACK", "f32[5,100]{1,0:S(5)}")
    seconds = 400 / 1000
    whole, turn = sorted(host_traffic(text, BYTES_ONLY, 1000.0), key=lambda traffic: traffic.turns)
    assert (whole.turns, whole.copies, whole.hidden) == (1, HostCopy(there=28), 0)
    assert (turn.turns, turn.copies, turn.seconds) == (5, HostCopy(there=400, back=400), 2 * seconds)
    assert turn.kernels == 800, "the negation, which reads and writes device memory"
    assert turn.hidden == seconds, "the copy back ends where it starts"
    assert turn.exposed == pytest.approx(5 * seconds)
