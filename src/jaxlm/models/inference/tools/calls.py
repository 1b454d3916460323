"""Calls tools in the middle of a generated text: finds a call, runs the tool, and encodes its output.

<|python_start|> 12 * 7 <|python_end|> <|output_start|> 84 <|output_end|>
the model writes this                  the tool's output, forced into the stream
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import draccus

from jaxlm.core.errors import ConfigError
from jaxlm.reading.choices import Registry


@dataclass(frozen=True)
class Tool(Registry, draccus.ChoiceRegistry, abc.ABC):
    """A program that a model calls while it generates. `--tool` of `jaxlm chat` and `jaxlm sample` selects it by name."""

    @abc.abstractmethod
    def run(self, call: str) -> str | None:
        """The output for a call; None if the call has no output, because it is invalid.

        It must not raise, must end soon, and must return the same for the same call: every process of a mesh runs it, and
        all of them continue with its output.
        """


TOOL_TOKENS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
TEXT, CALL, OUTPUT = "text", "python", "python_output"


class ToolTokens(NamedTuple):
    """Ids of the special tokens around a call and around its output."""

    call_start: int
    call_end: int
    output_start: int
    output_end: int

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> "ToolTokens | None":
        """The tokens of a tokenizer with this vocabulary (token -> id); None if it lacks one."""
        ids = [vocabulary[token] for token in TOOL_TOKENS if token in vocabulary]
        return cls(*ids) if len(ids) == len(TOOL_TOKENS) else None


@dataclass(frozen=True)
class ToolCalls:
    """Answers the calls of one tool.

    Attributes:
        encode: encodes text to tokens, none of them special.
        decode: decodes tokens to text, without special tokens.
    """

    tool: Tool
    tokens: ToolTokens
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, tool: Tool, tokenizer: Any, key: str) -> "ToolCalls":
        """Answers the calls of models with this tokenizer. Raises `ConfigError` if it has no tokens for calls.

        Args:
            key: what chose the tool, such as `--tool`.
        """
        vocabulary = tokenizer.vocabulary()
        tokens = ToolTokens.of(vocabulary)
        if tokens is None:
            missing = next(token for token in TOOL_TOKENS if token not in vocabulary)
            raise ConfigError(
                f"{key} given, but the model cannot call a tool: its tokenizer has no token {missing}. Remove it"
            )
        return cls(tool, tokens, tokenizer.encode, tokenizer.decode)

    def output_after(self, ids: Sequence[int]) -> list[int]:
        """The tokens that must follow `ids`, whose last token ends a call; none if the call has no output."""
        start, end = self.tokens.call_start, self.tokens.call_end
        call = []
        for token in reversed(ids[:-1]):
            if token == start:
                break
            if token == end:
                return []  # ends a second time
            call.append(token)
        else:
            return []  # never began
        output = self.tool.run(self.decode(call[::-1])) if call else None
        if output is None:
            return []
        return [self.tokens.output_start, *self.encode(output), self.tokens.output_end]

    def parts(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """A continuation as the content of a message: a list of texts, calls and outputs, in order."""
        return [{"type": kind, "text": text} for kind, text, _ in self._pieces(ids)]

    def show(self, ids: Sequence[int]) -> str:
        """The text of a continuation, with calls and their outputs as in `12 * 7 is <<12 * 7=84>>84`.

        More tokens only add to the text, except that they may complete its last character.
        """
        return "".join(text for text, _ in self.fragments(ids))

    def fragments(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The parts of `show(ids)`, each with whether the model wrote it, and not the tool or this class."""
        shown, is_open = [], False
        for kind, text, has_ended in self._pieces(ids):
            if kind == OUTPUT:
                shown.append((("=" if is_open else "<<=") + text + (">>" if has_ended else ""), False))
                is_open = not has_ended
            else:
                shown += [((">>" if is_open else "") + ("<<" if kind == CALL else ""), False), (text, True)]
                is_open = kind == CALL
        return shown

    def _pieces(self, ids: Sequence[int]) -> Iterator[tuple[str, str, bool]]:
        """Each stretch between the tool's special tokens: its kind, its text, and whether it has ended. Leaves out empty
        text."""
        begins = {self.tokens.call_start: CALL, self.tokens.output_start: OUTPUT}
        kind, inside = TEXT, []
        for token in ids:
            if token not in begins and token not in (self.tokens.call_end, self.tokens.output_end):
                inside.append(token)
                continue
            if kind != TEXT or inside:
                yield kind, self.decode(inside), token not in begins
            kind, inside = begins.get(token, TEXT), []
        if kind != TEXT or inside:
            yield kind, self.decode(inside), False
