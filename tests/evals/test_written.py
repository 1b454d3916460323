"""The evaluations that let a model and a reference write: `cases` and `continuations`, on models that follow a script."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import check_fields
from jaxlm.evals.base import EvalConfig
from jaxlm.evals.cases import Case, CasesEvalConfig, ContinuationsEvalConfig
from jaxlm.models.base import Hidden, LanguageModel, vocab_axis
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.engine.helpers import layout, one_device
from tests.evals.test_gates import MESHES, WHERE, built, context, validation_batches
from tests.tiers import one_of

CHARACTERS = "\0" + "abcdefghijklmnopqrstuvwxyz0123456789 =+.,-?"
END = 0


class Characters:
    """A tokenizer whose tokens are characters. The first one ends a text."""

    stop_ids = (END,)

    def ids_before(self, *, bos):
        return ()

    def encode(self, text):
        return [CHARACTERS.index(one) for one in text]

    def decode(self, ids):
        return "".join(CHARACTERS[one] for one in ids)


class Script(LanguageModel):
    """Continues each character by one that depends on it alone: a text is a path through a table.

    Attributes:
        table: float32 {vocab, next}, log-probabilities.
    """

    table: jnp.ndarray
    length: int = eqx.field(static=True, default=64)

    @staticmethod
    def of(following: dict[str, str]) -> "Script":
        """Args: following: the characters that may follow each, the most likely first; the text ends after others."""
        size = len(CHARACTERS)
        scores = np.full((size, size), -20.0, np.float32)
        for one in range(size):
            likely = following.get(CHARACTERS[one], "\0")
            for rank, other in enumerate(likely):
                scores[one, CHARACTERS.index(other)] = -float(rank)
        return Script(jnp.asarray(scores - np.log(np.exp(scores).sum(1, keepdims=True))))

    @property
    def Vocab(self):
        return vocab_axis(len(CHARACTERS))

    @property
    def Pos(self):
        return Axis("position", self.length)

    def hidden(self, inputs, *, cache=None, taps=(), key=None):
        tokens = inputs.tokens
        return Hidden(NamedArray(self.table[tokens.array], (*tokens.axes, self.Vocab)), cache)

    def lm_head(self):
        return None

    def init_cache(self, Batch, capacity, dtype):
        return hax.zeros((Batch,))


# 4 follows '=' and ends the text; the reference ends with 7 instead.
STUDENT, TEACHER = Script.of({"=": "43", "4": "\0"}), Script.of({"=": "73", "7": "\0"})
CASES = [
    Case("sum", "2+2=", 4),
    Case("other", "a=", 7),
    Case("text", "b=", " 4", kind="text_greedy"),
    Case("choice", "c=", "3", kind="choice_logprob", choices=["3", "7"]),
]


def measured(cases, where=None, **keys):
    where = where or one_device()
    lines: list[str] = []
    with where.use():
        config = CasesEvalConfig(cases=cases, max_new_tokens=4, **keys)
        found = config.open(context(where, TEACHER, [], Characters(), lines.append)).run(STUDENT)
    return {name.removeprefix("cases/"): value for name, value in found.items()}, lines


@pytest.mark.slow
@pytest.mark.parametrize("where", one_of([layout, one_device]))
def test_answers_are_written_and_chosen(where):
    # The student writes 4: right for "sum" and "text". Of 3 and 7 it finds 3 more likely, the reference 7.
    found, lines = measured(CASES, where())
    assert found == {"accuracy": 0.75, "reference_accuracy": 0.25, "accuracy_drop": -0.5}
    assert lines == ["cases: only the reference answers other"]


def test_without_a_reference_only_the_model_answers():
    found, _ = measured(CASES[:2], reference=None)
    assert found == {"accuracy": 0.5}


def test_limits_of_accuracies():
    limits = CasesEvalConfig(cases=CASES, min_student_accuracy=0.7, max_accuracy_drop=0.1).metrics.limits
    lines = limits.violations("eval", {"cases/accuracy": 0.5, "cases/accuracy_drop": 0.2})
    assert lines == [
        "eval/cases/accuracy is 0.5, at least 0.7 allowed (min_student_accuracy: 0.7)",
        "eval/cases/accuracy_drop is 0.2, at most 0.1 allowed (max_accuracy_drop: 0.1)",
    ]


@pytest.mark.parametrize(
    ("text", "right"),
    [("42", True), (" is 42.", True), ("1,042", False), ("-42", False), ("no", False), ("42 or 7", True)],
)
def test_the_first_integer_counts(text, right):
    assert Case("a", "", 42).is_right(text) == right
    assert Case("a", "", "1042").is_right(f"is {text}") == (text == "1,042")


def test_cases_may_be_in_a_file(tmp_path):
    file = tmp_path / "cases.jsonl"
    records = [
        {"id": "b", "prompt": "2+2=", "answer": 4},
        {"id": "c", "prompt": "a=", "answer": "7", "kind": "int_greedy"},
    ]
    file.write_text("\n\n".join(map(json.dumps, records)))
    found, _ = measured([Case("a", "1=", 4)], file=str(file))
    assert found["accuracy"] == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="2 cases have the id 'b'"):
        measured([Case("b", "1=", 4)], file=str(file))
    file.write_text('{"id": "b"}')
    with pytest.raises(ConfigError, match=r"cases\.jsonl, line 1: .*prompt"):
        measured([], file=str(file))
    file.write_text("[1]")
    with pytest.raises(ConfigError, match=r"line 1: a JSON object expected"):
        measured([], file=str(file))
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"line 1: not a JSON object: it is nested too deeply"):
        measured([], file=str(file))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"answer": "four"}, "answer: 'four' given with kind: int_greedy, an integer such as 42 expected"),
        (
            {"answer": 4, "choices": ["4"]},
            r"choices: \['4'\] given without kind: choice_logprob, but kind is int_greedy",
        ),
        ({"answer": "5", "choices": ["4"], "kind": "choice_logprob"}, "the answer among them"),
        ({"answer": " ", "kind": "text_greedy"}, "a text expected"),
        ({"answer": 4, "prompt": "a" * 70}, "70 tokens and max_new_tokens is 32, .*seq_len: 16. Shorten the prompt$"),
        (
            {"answer": 4, "prompt": "a" * 9},
            "has 9 tokens .*seq_len: 16. Shorten the prompt, or set max_new_tokens to at most 7$",
        ),
    ],
)
def test_cases_that_make_no_sense_are_refused(case, message):
    def check() -> None:
        config: Any = decode(EvalConfig, ConfigSource({"type": "cases", "cases": [{"id": "x", "prompt": "a", **case}]}))
        config.check()
        config.check_opens(Characters, 16, dry=False)

    with pytest.raises(ConfigError, match=message):
        check()


def test_keys_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match=r"none of cases, file given, at least one expected"):
        check_fields(CasesEvalConfig())
    with pytest.raises(ConfigError, match=r"max_accuracy_drop: 0\.1 given together with reference: null"):
        check_fields(CasesEvalConfig(cases=CASES, reference=None, max_accuracy_drop=0.1))


def text_batches(rows: list[str]) -> list[Any]:
    """A batch of sequences of 8 characters, each one document, then padding."""
    (batch,) = validation_batches(one_device(), 1)
    tokens = np.zeros((16, 16), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = Characters().encode(row)
    columns = {"tokens": tokens, "segment_ids": (tokens != 0).astype(np.int32)}
    named = {name: hax.named(jnp.asarray(column), batch.tokens.axes) for name, column in columns.items()}
    return [eqx.tree_at(lambda b: (b.tokens, b.segment_ids), batch, (named["tokens"], named["segment_ids"]))]


def test_continuations_agree_up_to_the_first_other_token():
    where = one_device()
    # After a: bcd (the model) and bcf (the reference); after x: y from both.
    student = Script.of({"a": "b", "b": "c", "c": "df", "d": "\0", "x": "y"})
    teacher = Script.of({"a": "b", "b": "c", "c": "fd", "f": "\0", "x": "y"})
    tokenizer = Characters()
    with where.use():
        config = ContinuationsEvalConfig(prompt_tokens=2, max_new_tokens=8)
        found = config.open(context(where, teacher, text_batches(["za", "zx", "q"]), tokenizer)).run(student)
        table = np.asarray(teacher.table, np.float64)

    def nats(text: str) -> list[float]:
        ids = tokenizer.encode(text)
        return [-table[one, other] for one, other in itertools.pairwise(ids)]

    own, theirs = nats("abcd\0") + nats("xy\0"), nats("abcf\0") + nats("xy\0")
    expected = {
        "agreement": (2 + 2) / (4 + 2),  # the token that ends a text counts
        "token_agreement": (3 + 2) / (4 + 2),  # both texts of the first prompt end at the same place
        "nll": sum(own) / len(own),
        "reference_nll": sum(theirs) / len(theirs),
        "delta_nll": sum(own) / len(own) - sum(theirs) / len(theirs),
    }
    assert found == pytest.approx({f"continuations/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert found["continuations/delta_nll"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("where", MESHES)
def test_a_model_continues_as_it_does_itself(where):
    where = WHERE[where]()
    tokenizer: Any = SimpleNamespace(stop_ids=(END,))
    with where.use():
        model = built(0, where)
        config = ContinuationsEvalConfig(prompts=12, prompt_tokens=4, max_new_tokens=6)
        found = config.open(context(where, model, None, tokenizer)).run(model)
    assert found["continuations/agreement"] == found["continuations/token_agreement"] == 1.0
    assert found["continuations/delta_nll"] == 0.0
    assert found["continuations/nll"] > 0.0


def test_continuations_that_do_not_fit_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"a beginning .prompt_tokens. has 32 tokens and max_new_tokens is 32, which together exceed model\.seq_len: 63",
    ):
        ContinuationsEvalConfig().check_opens(lambda: None, 63, dry=False)
    limits = ContinuationsEvalConfig(min_agreement=0.5, max_delta_nll=0.1).metrics.limits.by_metric
    assert limits.keys() == {"continuations/agreement", "continuations/delta_nll"}
