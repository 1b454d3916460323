"""The calculator against Python, calls in tokens, and generation that continues with the output of a tool."""

import itertools
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.core.axes import POSITION
from jaxlm.models.base import Hidden, LanguageModel, vocab_axis
from jaxlm.models.inference.decoding import num_programs
from jaxlm.models.inference.generate import GenerationConfig, generate, generate_tokens, stream_tokens
from jaxlm.models.inference.sampling import StopStrings
from jaxlm.models.inference.tools.calculator import Calculator
from jaxlm.models.inference.tools.calls import TOOL_TOKENS, Tool, ToolCalls, ToolTokens
from jaxlm.models.inference.unstacked import Generator
from tests.engine.helpers import layout

NUMBERS = st.one_of(
    st.integers(0, 10**9).map(str),
    st.decimals(0, 10**6, places=3).map(str),
    st.sampled_from(("0", ".5", "1.", "007.5")),
)


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(inner, st.sampled_from((" + ", "-", " * ", "/", "//")), inner).map("".join)
    return st.one_of(binary, inner.map("({})".format), inner.map("-{}".format), inner.map("+ {}".format))


def as_python(expression: str) -> str | None:
    try:
        value = eval(expression)
    except ArithmeticError:
        return None
    return str(value) if abs(value) < float("inf") else None


@pytest.mark.slow
@settings(max_examples=400)
@given(st.recursive(NUMBERS, compound, max_leaves=12))
def test_arithmetic_is_pythons(expression):
    assert Calculator(max_characters=4096).run(expression) == as_python(expression)


QUOTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="\\'\"")


@pytest.mark.slow
@settings(max_examples=50)
@given(st.text(QUOTABLE, max_size=40), st.text(QUOTABLE, max_size=2), st.sampled_from("'\""))
def test_counting_is_pythons(text, part, quote):
    assert Calculator().run(f"{quote}{text}{quote}.count({quote}{part}{quote})") == str(text.count(part))


@pytest.mark.parametrize(
    ("call", "output"),
    [
        ("12 * 7", "84"),
        (" (1 + 2) * 3 ", "9"),
        ("1,234 + 1", "1235"),
        ("10 / 4", "2.5"),
        ("84 / 12", "7.0"),
        ("-7 // 2", "-4"),
        ("0.1 + 0.2", "0.30000000000000004"),
        ("'strawberry'.count('r')", "3"),
        ('("a,b,c").count(",")', "2"),
        ("'open'.count('o') + 1", "2"),
    ],
)
def test_outputs(call, output):
    assert Calculator().run(call) == output


DIGITS = "9" * 200
HOSTILE = [
    *("", " ", "()", "1 +", "1 2", "abc", "x + 1", "1 / 0", "1 // 0.0", "2 ** 3", "9**9**9**9", "1 % 2", "1 < 2"),
    *("1 if 1 else 2", "__import__('os').system('ls')", "open('/etc/passwd')", "().__class__.__mro__", "print(1)"),
    *("lambda: 1", "[1] * 9", "'a' * 10**9", "'a' + 'b'", "'a'", "'a'.join('b')", "'a'.count", "'a'.count(1)"),
    *("'a'.count('a', 0)", "'a'.count(x='a')", "f'{1}'.count('1')", "b'a'.count(b'a')", "'a'.upper().count('A')"),
    *("'\\x61'.count('a')", "x.count('a')", "True + 1", "'a'.count('a') + True", "'a'.count('a') if 1 else 0"),
    *("'%s' % 1", "1e5", "1j", "0x10", "1_000", "1\n+ 1", "1\t+ 1", "\ud800", "1\0", "\N{ARABIC-INDIC DIGIT ONE}"),
    *("(" * 10**6, "1+" * 10**6 + "1", "-" * 10**6 + "1", f"{DIGITS} ** {DIGITS}", "9" * 10**6, "'" * 10**6),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_everything_else_has_no_output(number):
    assert Calculator().run(HOSTILE[number]) is None


def test_limits_hold_for_longer_calls_too():
    patient = Calculator(max_characters=4096, max_exponent=1000)
    for call in ("(" * 2000 + "1" + ")" * 2000, "-" * 4000 + "1", "1" + "0" * 400 + ".0", "9" * 2000, "9" * 4000):
        assert patient.run(call) is None
    assert patient.run(f"{DIGITS} * {DIGITS}") == str(int(DIGITS) ** 2)
    for call in (
        "9**9**9",
        "2 ** 1001",
        "10 ** 1000 * 10 ** 1000",
        "10.0 ** 400",
        "(-8) ** 0.5",
        "0 ** -1",
        "9 ** 999 ** 2",
    ):
        assert patient.run(call) is None
    assert patient.run("2 ** 10 - 2 ** -1") == "1023.5"
    assert Calculator(max_exponent=3).run("2 ** 3") == "8"
    assert Calculator(max_exponent=3).run("2 ** 4") is None
    assert Calculator(max_characters=3).run("1+11") is None


ALPHABET = "0123456789+-*/(). 'abcdefghijklmno"
START, END, OUTPUT_START, OUTPUT_END, STOP, BOS = range(34, 40)
TOKENS = ToolTokens(START, END, OUTPUT_START, OUTPUT_END)
STOPPED = GenerationConfig(16, temperature=0.0, stop_ids=(STOP,))


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def read(ids: list[int]) -> str:
    return "".join(ALPHABET[number] for number in ids if number < START)


CALLS = ToolCalls(Calculator(), TOKENS, encode, read)
ANSWER = [START, *encode("12*7"), END, OUTPUT_START, *encode("84"), OUTPUT_END, *encode("ok")]


def test_the_tokens_of_a_tokenizer():
    vocabulary = {token: number for number, token in enumerate(TOOL_TOKENS, start=5)}
    assert ToolTokens.of(vocabulary) == (5, 6, 7, 8)
    assert ToolTokens.of({token: n for token, n in vocabulary.items() if n != 7}) is None


@pytest.mark.parametrize(
    ("ids", "output"),
    [
        (ANSWER[:6], ANSWER[6:10]),
        ([*encode("a"), START, *encode("1"), START, *encode("2"), END], [OUTPUT_START, *encode("2"), OUTPUT_END]),
        ([*ANSWER, START, *encode("3-9"), END], [OUTPUT_START, *encode("-6"), OUTPUT_END]),
        ([START, END], []),
        ([*encode("1"), END], []),
        ([*ANSWER[:6], *encode("1"), END], []),
        ([START, *encode("1/0"), END], []),
        ([START, *encode("abc"), END], []),
    ],
)
def test_outputs_follow_calls(ids, output):
    assert CALLS.output_after(ids) == output


def test_parts_and_text_of_an_answer():
    ids = [*encode("and "), *ANSWER, START, *encode("1/0"), END, *encode("no"), START, *encode("9")]
    assert CALLS.parts(ids) == [
        {"type": "text", "text": "and "},
        {"type": "python", "text": "12*7"},
        {"type": "python_output", "text": "84"},
        {"type": "text", "text": "ok"},
        {"type": "python", "text": "1/0"},
        {"type": "text", "text": "no"},
        {"type": "python", "text": "9"},
    ]
    assert CALLS.show(ids) == "and <<12*7=84>>ok<<1/0>>no<<9"
    shown = [CALLS.show(ids[:end]) for end in range(len(ids) + 1)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(shown)), "it can be streamed"
    assert CALLS.show([OUTPUT_START, *encode("5"), OUTPUT_END, *encode("a")]) == "<<=5>>a"
    assert CALLS.parts([]) == []


def test_a_stop_string_ends_only_what_the_model_wrote():
    ids = [*encode("an "), *ANSWER]
    assert CALLS.show(ids) == "an <<12*7=84>>ok"
    for texts, shown in (
        (["84"], CALLS.show(ids)),
        (["<<"], CALLS.show(ids)),
        (["7o"], CALLS.show(ids)),  # on both sides of an output
        (["k"], "an <<12*7=84>>o"),
        (["*7"], "an <<12"),
        (["k", "n "], "a"),
    ):
        stops = StopStrings(texts, CALLS.fragments)
        assert stops.before(ids) == shown
        assert stops.until is not None
        assert stops.until(ids) == (shown != CALLS.show(ids))
    assert StopStrings.of_text(["b"], read).before(encode("abc")) == "a"
    assert StopStrings.of_text([], read).until is None


class Scripted(LanguageModel):
    """Its next token depends only on the position, so that rows with prompts of other lengths follow other scripts."""

    script: jax.Array  # int32 [position]
    certainty: jax.Array

    Vocab = property(lambda self: vocab_axis(40))
    Pos = property(lambda self: Axis(POSITION, self.script.shape[0]))

    def hidden(self, inputs, *, cache=None, taps=(), key=None):
        following = jax.nn.one_hot(self.script[inputs.positions.array], self.Vocab.size) * self.certainty
        return Hidden(hax.named(following, (*inputs.tokens.axes, self.Vocab)), cache)

    def lm_head(self):
        return None

    def init_cache(self, Batch, capacity, dtype):
        return jnp.zeros(())


UNSEEN = encode("aaaaaa")  # what the model would say where the tool's output is forced
SCRIPTS = {
    # Length of the prompt -> what the model says from there on, and the new tokens that must come of it.
    1: ([*ANSWER[:6], *UNSEEN[:4], *encode("ok"), STOP], ANSWER),
    41: ([START, *encode("1/0"), END, *encode("no"), STOP], [START, *encode("1/0"), END, *encode("no")]),
    61: (
        [START, *encode("2"), END, *UNSEEN[:3], START, *encode("9-3"), END, *UNSEEN[:3], STOP],
        [
            *(START, *encode("2"), END, OUTPUT_START, *encode("2"), OUTPUT_END),
            *(START, *encode("9-3"), END, OUTPUT_START, *encode("6"), OUTPUT_END),
        ],
    ),
    81: ([END, *encode("a"), STOP], [END, *encode("a")]),
    101: ([START, END, *encode("b"), STOP], [START, END, *encode("b")]),
    121: ([*encode("abcdefghij"), STOP], encode("abcdefghij")),
}
PROMPTS = [[BOS] * length for length in SCRIPTS]


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    script = np.full(200, ALPHABET.index("o"))
    for length, (said, _) in SCRIPTS.items():
        script[length - 1 : length - 1 + len(said)] = said
    return Scripted(jnp.asarray(script, jnp.int32), jnp.float32(100.0))


@pytest.mark.slow
def test_outputs_are_forced_into_every_row_of_a_batch(scripted):
    generator, expected = Generator.of(scripted), [new for _, new in SCRIPTS.values()]
    assert generate_tokens(generator, PROMPTS, STOPPED, tools=CALLS) == expected
    # Without a tool, the model goes on by itself.
    alone = generate_tokens(generator, PROMPTS, STOPPED)
    assert [row == new for row, new in zip(alone, expected, strict=True)] == [False, True, False, True, True, True]
    # In pieces, with a condition to stop, from the same compiled functions.
    before = num_programs()
    pieces = list(stream_tokens(generator, PROMPTS, STOPPED, every=3, tools=CALLS))
    assert [list(itertools.chain(*row)) for row in zip(*pieces, strict=True)] == expected
    assert generate_tokens(generator, PROMPTS[::-1], STOPPED, tools=CALLS) == expected[::-1]
    assert num_programs() == before, "compiled again"
    cut = generate_tokens(generator, PROMPTS[:1], STOPPED, until=lambda row: row[-1] == END, tools=CALLS)
    assert cut == [ANSWER[:6]], "a row that has ended has no output"


def test_an_output_counts_as_new_tokens_and_is_cut_at_their_maximum(scripted):
    for maximum in (6, 7, 9, 10):
        config = GenerationConfig(maximum, temperature=0.0, stop_ids=(STOP,))
        assert generate_tokens(Generator.of(scripted), PROMPTS[:1], config, tools=CALLS) == [ANSWER[:maximum]]


@dataclass(frozen=True)
class Constant(Tool):
    """Always answers the same."""

    def run(self, call: str) -> str | None:
        return "12"


def by_hand(model, prompt: list[int], calls: ToolCalls, num_new: int) -> list[int]:
    """Greedy tokens, each from a pass over all tokens before it, with the outputs of calls in between."""
    ids: list[int] = []
    while len(ids) < num_new:
        ids += generate(model, [prompt + ids], max_new_tokens=1, temperature=0.0)[0]
        ids += calls.output_after(ids) if ids[-1] == calls.tokens.call_end else []
    return ids[:num_new]


@pytest.fixture
def calling(tiny_llama, built):
    """A random model, a tool whose tokens are some that it generates after `PROMPT`, and where the first call ends."""
    model = built(tiny_llama)
    (free,) = generate(model, [PROMPT], max_new_tokens=20, temperature=0.0)
    end = next(n for n in range(2, 20) if free[n] not in free[:n])
    start = next(free[n] for n in range(end - 2, -1, -1) if free[n] not in free[n + 1 : end])
    return model, ToolCalls(Constant(), ToolTokens(start, free[end], 38, 39), encode, str), end


PROMPT = [1, 2, 3]


@pytest.mark.slow
def test_the_model_reads_the_output(calling):
    model, calls, end = calling
    prompts = [PROMPT, [4], [5, 6, 7, 8, 9, 10]]
    config = GenerationConfig(20, temperature=0.0)
    together = generate_tokens(Generator.of(model), prompts, config, tools=calls)
    assert together == [by_hand(model, prompt, calls, 20) for prompt in prompts]
    assert together[0][end + 1 : end + 5] == [38, 1, 2, 39]


@pytest.mark.slow
def test_sampled_rows_do_not_depend_on_their_batch(calling):
    model, calls, _ = calling
    config = GenerationConfig(20, temperature=1.0, top_k=3, seed=4)
    prompts = [PROMPT, [4], PROMPT, [11, 12]]
    together = generate_tokens(Generator.of(model), prompts, config, tools=calls)
    assert generate_tokens(Generator.of(model), prompts, config, tools=calls) == together
    apart = [generate_tokens(Generator.of(model), [prompt], config, tools=calls)[0] for prompt in prompts]
    assert [apart[n] for n in (0, 1, 3)] == [together[n] for n in (0, 1, 3)]
    assert together[2] != together[0]
    assert any(38 in row for row in together)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [{}, {"model": 2}], ids=str)
def test_a_mesh_forces_the_same_tokens(calling, shards):
    model, calls, _ = calling
    config, prompts = GenerationConfig(20, temperature=0.0), [PROMPT, [4], [11, 12]]
    alone = generate_tokens(Generator.of(model), prompts, config, tools=calls)
    where = layout(**shards)
    with where.use():
        placed = jax.tree.map(
            lambda a: hax.NamedArray(jax.device_put(a.array, where.parameter_sharding(a.axes)), a.axes),
            model,
            is_leaf=lambda a: isinstance(a, hax.NamedArray),
        )
        assert generate_tokens(Generator.of(placed), prompts, config, tools=calls) == alone
