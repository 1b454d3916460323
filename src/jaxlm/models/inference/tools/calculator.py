"""A calculator for models: arithmetic, and how often a text occurs in another one. Nothing else can be evaluated.

Source: karpathy/nanochat (`nanochat/engine.py`, commit b7629ef) for what a call may contain. There, Python evaluates a call
that passes a filter, with a time limit. Here, the call is parsed, and every step of its evaluation has a limit.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated

from annotated_types import Interval

from jaxlm.core.field_types import NonNegativeInt
from jaxlm.models.inference.tools.calls import Tool
from jaxlm.reading.choices import choice

_ARITHMETIC = frozenset("0123456789.+-*/() ")
_QUOTES = ("'", '"')
_MAX_BITS = 4096  # of an integer: 1,233 digits
_COUNT = "count"
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
Number = int | float
CallLength = Annotated[int, Interval(ge=1, le=4096)]
"""Longer calls could exhaust the stack of Python's parser."""


class _NoOutputError(Exception):
    """The call contains something that the calculator does not evaluate."""


@choice(Tool, "calculator")
class Calculator(Tool):
    """Evaluates `+ - * / // ()` on numbers and `.count()` on texts, as Python does. Commas in numbers are left out.

    Attributes:
        max_characters: a longer call has no output.
        max_exponent: the largest exponent of `**`. 0 refuses every power, as nanochat does.
    """

    max_characters: CallLength = 256
    max_exponent: NonNegativeInt = 0

    def run(self, call: str) -> str | None:
        if len(call) > self.max_characters:
            return None
        has_text = any(quote in call for quote in _QUOTES)
        expression = call.strip() if has_text else call.replace(",", "").strip()
        # The first condition leaves out names, so nothing but numbers and operators is parsed without quotes.
        if not (has_text or _ARITHMETIC.issuperset(expression)) or not expression.isprintable() or "\\" in expression:
            return None
        try:
            return str(self._value(ast.parse(expression, mode="eval").body))
        except (_NoOutputError, SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
            return None

    def _value(self, node: ast.expr) -> Number:
        match node:
            case ast.Constant(value=value) if type(value) in (int, float):
                return _limited(value)  # pyright: ignore[reportArgumentType] - the guard is not understood
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._value(operand))
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._power(self._value(left), self._value(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _limited(_OPERATORS[type(op)](self._value(left), self._value(right)))
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str(text)), attr=attribute),
                args=[ast.Constant(value=str(part))],
                keywords=[],
            ) if attribute == _COUNT:
                return text.count(part)
        raise _NoOutputError

    def _power(self, base: Number, exponent: Number) -> Number:
        if abs(exponent) > self.max_exponent or not self.max_exponent:
            raise _NoOutputError
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
            raise _NoOutputError
        return _limited(base**exponent)


def _limited(value: Number | complex) -> Number:
    """The value, if it is a finite real number of limited size."""
    if isinstance(value, int) and value.bit_length() <= _MAX_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _NoOutputError
