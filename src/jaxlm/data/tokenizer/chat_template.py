"""Chat templates: conversations into text, as the library transformers renders them, and which part the assistant says.

Jinja2 in its sandbox, with `trim_blocks` and `lstrip_blocks`, `break` and `continue`, `raise_exception`, `tojson` without
escapes, and the block `{% generation %}`. Not there: the date (`strftime_now`), which would give other tokens tomorrow.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.tokenizer import Tokenizer

# Noncharacters of Unicode: no text may contain them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"([{_BEGIN}{_END}])")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT = "assistant"


class Rendered(NamedTuple):
    """A conversation as text, and the stretches of it (first character, the one behind the last) that are asked for."""

    text: str
    asked: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the names that it is given.

    Attributes:
        text: of the template.
        origin: where it is from, for messages.
        names: the tokenizer's special tokens (`bos_token`, ...).
    """

    text: str
    origin: str
    names: Mapping[str, str]

    @classmethod
    def load(cls, given: str | None, tokenizer: Tokenizer, key: str) -> "ChatTemplate":
        """The template that a key gives, or else the tokenizer's.

        Raises:
            ConfigError: there is none, or it is no template.
        """
        text, origin = given, key
        if given is not None and given.endswith(".jinja"):
            try:
                text, origin = Path(given).expanduser().read_text(encoding="utf-8"), given
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{key}: '{given}' cannot be read: {error}") from error
        elif given is None:
            text, origin = tokenizer.chat_template, "the tokenizer's"
        if text is None:
            raise ConfigError(
                f"{key}: null, and the tokenizer brings no chat template. Give one, as text or as the path of a .jinja file"
            )
        template = cls(text, origin, tokenizer.template_names)
        template.compiled()
        return template

    @property
    def has_generation(self) -> bool:
        """Whether it says itself what the assistant says."""
        return _GENERATION.search(self.text) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], where: str, *, mark: bool) -> Rendered:
        """A conversation's text; all of it is asked for, unless `mark`.

        Args:
            where: the conversation is found, for messages.

        Raises:
            ConfigError: the template does not take these messages, or what the assistant says cannot be told.
        """
        marked = self._text(messages, where)
        if not mark:
            text = _MARKS.sub("", marked)
            return Rendered(text, ((0, len(text)),))
        if self.has_generation:
            return _unmarked(marked)
        return Rendered(marked, tuple(self._differences(messages, marked, where)))

    def prompt(self, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        """A conversation's text, with what the template writes before the assistant's next message. See `render`."""
        return _MARKS.sub("", self._text(messages, where, add_generation_prompt=True))

    def _differences(self, messages: Sequence[Mapping[str, Any]], whole: str, where: str) -> list[tuple[int, int]]:
        """What each of the assistant's messages adds to the conversation up to it, its header left out."""
        found = []
        for number, message in enumerate(messages):
            if message["role"] == _ASSISTANT:
                before = self._text(messages[:number], where, add_generation_prompt=True)
                until = self._text(messages[: number + 1], where)
                if not (until.startswith(before) and whole.startswith(until)):
                    raise ConfigError(
                        f"{where}: what the assistant says in message {number + 1} cannot be told: this chat template"
                        f" ({self.origin}) renders the beginning of a conversation otherwise than the whole of it. Give one"
                        " with {% generation %} around it, or set mask_user_turns to false"
                    )
                found.append((len(before), len(until)))
        return found

    def _text(self, messages: Sequence[Mapping[str, Any]], where: str, *, add_generation_prompt: bool = False) -> str:
        import jinja2

        if _MARKS.search(json.dumps(messages, ensure_ascii=False, default=str)):
            raise ConfigError(f"{where}: the text holds U+FDD0 or U+FDD1, which are no characters")
        options = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self.compiled().render(**options, **self.names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{where}: the chat template ({self.origin}) does not take this conversation: {type(error).__name__}: {error}"
            ) from error

    def compiled(self) -> Any:
        """As Jinja has it; a `ConfigError` where it is no template."""
        import jinja2

        try:
            return _compiled(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template ({self.origin}), line {error.lineno}: {error.message}") from error


def _unmarked(marked: str) -> Rendered:
    """Text without the marks around what is generated, and where that is."""
    parts, asked, size, begin = [], [], 0, None
    for part in _MARKS.split(marked):
        if part == _BEGIN:
            begin = size
        elif part == _END:
            assert begin is not None, "blocks end where they have begun"
            asked.append((begin, size))
        else:
            parts.append(part)
            size += len(part)
    return Rendered("".join(parts), tuple(asked))


@functools.cache
def _compiled(text: str) -> Any:
    return _environment().from_string(text)


@functools.cache
def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}`: what is inside, between marks."""

        tags = {"generation"}  # noqa: RUF012  (Jinja reads a plain attribute)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return _BEGIN + caller() + _END

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
