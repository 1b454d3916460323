"""Renders conversations with chat templates the way transformers does, and finds the assistant's text in the result.

Templates run in the Jinja2 sandbox with `trim_blocks`, `lstrip_blocks`, `break` and `continue`, `raise_exception`, `tojson`
without HTML escapes, and the block `{% generation %}`. The date (`strftime_now`), `lipsum` and the filter `random` are not
supported: with them, the same data would give different tokens every day. They run in a process of their own, with limits
(`data/tokenizer/rendering.py`).
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import pickle
import reprlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_text
from jaxlm.data.tokenizer.rendering import BEGIN, END, INVALID, MARKS, SYNTAX, TEXT, TOO_LARGE, Job, Limits, Reads
from jaxlm.data.tokenizer.templates import NAMED
from jaxlm.data.tokenizer.tokenizer import Tokenizer

LIMITS = Limits()
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from jaxlm.data.tokenizer.rendering import serve; serve(int(sys.argv[2]))"
)
_EXIT_S = 2.0


class RenderingError(Exception):
    """Says what a template did instead of rendering, as the rest of a sentence about it."""


class UnsuitableTextError(Exception):
    """Says what is wrong with a conversation for any template, as a sentence."""


class Renderer:
    """The process, started for the first template and again if a template has ended it. It ends with this one."""

    def __init__(self):
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, job: Job) -> list[str]:
        """The texts of a job.

        Raises:
            RenderingError: whatever the template does instead, or needs more of than `LIMITS`.
            UnsuitableTextError: the conversation has characters that mark what the template generates.
        """
        try:
            request = pickle.dumps((LIMITS, job))
        except RecursionError:
            raise RenderingError(" cannot render this conversation, because it is nested too deeply") from None
        with self._lock:
            try:
                texts, (kind, content) = self._ask_again_if_killed(request, max(1, len(job.until)))
            except BaseException:
                self.end()  # what it still sends must not answer the next job
                raise
        if kind == TEXT:
            return texts
        if kind == INVALID:
            raise UnsuitableTextError(content)
        does = " rejects this conversation: " if job.until else " cannot be compiled: "
        raise RenderingError({SYNTAX: ", ", TOO_LARGE: " needs "}.get(kind, does) + content)

    def _ask_again_if_killed(self, request: bytes, number: int) -> tuple[list[str], tuple[bytes, str]]:
        """Like `_ask`. A template cannot send itself SIGKILL: somebody else did, such as the system when memory ran out."""
        for is_last in (False, True):
            try:
                return self._ask(request, number)
            except (EOFError, OSError):
                code = self.end()
                if is_last or code != -signal.SIGKILL:
                    raise RenderingError(_how_it_died(code)) from None
        raise AssertionError("unreachable")

    def _ask(self, request: bytes, number: int) -> tuple[list[str], tuple[bytes, str]]:
        """The texts, and the kind and the content of the last message."""
        connection, texts = self._connection or self._start(), []
        connection.send_bytes(request)
        for _ in range(number):
            message = connection.recv_bytes()
            kind, content = message[:1], message[1:].decode("utf-8")
            texts.append(content)
            if kind != TEXT:  # the last one of the job
                return texts, (kind, content)
        return texts, (TEXT, "")

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, paths, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise ConfigError(
                    f"the process that renders chat templates cannot be started ({error.strerror}). Free memory or processes"
                ) from error
        self._connection = Connection(ours.detach())
        return self._connection

    def end(self) -> int | None:
        """Ends the process. Returns its exit code; None if there was none."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        try:
            return process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def forget(self) -> None:
        """In a fork of this process: leaves the process to the parent."""
        if self._connection is not None:
            self._connection.close()
        self._lock, self._connection, self._process = threading.Lock(), None, None


def _how_it_died(code: int | None) -> str:
    if code == -signal.SIGPROF:
        return f" takes more than {LIMITS.cpu_s:g} s of a CPU to render this conversation"
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    return f" ended the process that rendered this conversation ({how})"


RENDERER = Renderer()
atexit.register(RENDERER.end)
os.register_at_fork(after_in_child=RENDERER.forget)


_ASSISTANT = "assistant"
_GOES_ON = "ANSWER_GOES_ON_HERE "  # the space tells whether a template keeps those at the end
_ANSWERS = ("jaxlm", "haliax")  # of an example: they end differently, in capitals too
_CALLS = ("tool_calls", "function_call")  # keys of messages
_VERSION = 3  # of how records become what templates render
RENDERING = _TEMPLATE, CONVERSATIONS = "chat_template", "conversations"  # keys of what determines rendered text
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Variables: TypeAlias = Mapping[str, Any]
NONE: Variables = MappingProxyType({})


class Rendered(NamedTuple):
    """A rendered conversation, and the character ranges (begin, end) that the loss is computed on."""

    text: str
    target_spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the variables passed to it.

    Attributes:
        text: the Jinja template.
        origin: where the template comes from, for messages.
        names: variables for the tokenizer's special tokens (`bos_token`, ...).
    """

    text: str
    origin: str
    names: Mapping[str, str]

    def cache_key(self) -> dict[str, Any]:
        """Returns what determines rendered text, as plain JSON."""
        content = json.dumps([self.text, dict(self.names)])
        return {_TEMPLATE: hashlib.sha256(content.encode()).hexdigest(), CONVERSATIONS: _VERSION}

    @property
    def reads(self) -> Reads:
        """The variables, keys and marks that the template reads. Raises `ConfigError` if it is invalid."""
        try:
            return _read_by(self.text)
        except RenderingError as error:
            raise ConfigError(f"the chat template ({self.origin}){error}") from error

    @classmethod
    def load(cls, source: str | None, tokenizer: Tokenizer, key: str) -> "ChatTemplate":
        """Loads the given template (one of `templates.NAMED`, text, or the path of a .jinja file); None loads the
        tokenizer's.

        Args:
            key: config path, for messages.

        Raises:
            ConfigError: there is no template, it is invalid, or the tokenizer lacks its special tokens.
        """
        text, origin = source, key
        if source is not None and source in NAMED:
            text, origin = _named(source, tokenizer, key), source
        elif source is not None and source.endswith(".jinja"):
            text, origin = _read(source, tokenizer, key), source
        elif source is None:
            text, origin = tokenizer.chat_template, "the tokenizer's"
        if text is None:
            raise ConfigError(
                f"{key}: null, but the tokenizer has no chat template. Give one: {', '.join(NAMED)}, a text, or the path of"
                " a .jinja file"
            )
        template = cls(text, origin, tokenizer.template_names)
        _ = template.reads
        return template

    def render(
        self, messages: Messages, where: str, *, mark: bool, variables: Variables = NONE, without: Collection[int] = ()
    ) -> Rendered:
        """Renders a conversation.

        Args:
            where: location of the conversation, for messages.
            mark: restrict the target spans to the assistant's text; otherwise the loss is computed on all text.
            variables: what the template gets beside the messages, such as `tools`.
            without: with `mark`, the numbers of answers without loss.

        Raises:
            ConfigError: the template rejects the messages, or the assistant's text cannot be located.
        """
        whole = (len(messages), False)
        if not mark:
            text = MARKS.sub("", self._texts(messages, where, variables, [whole])[0])
            return Rendered(text, ((0, len(text)),))
        roles = [message["role"] for message in messages]
        # Without blocks, an answer is what its message adds to the conversation and the header of the message.
        answers = [n for n, role in enumerate(roles) if role == _ASSISTANT and (n in without) == self.reads.marks]
        ends = [end for n in answers for end in ((n, not self.reads.marks), (n + 1, False))]
        text, *texts = self._texts(messages, where, variables, [whole, *ends])
        for number, before, until in zip(answers, texts[::2], texts[1::2], strict=True):
            if not (until.startswith(before) and text.startswith(until)):
                raise ConfigError(
                    f"{where}: the assistant's text in message {number + 1} cannot be located: the chat template"
                    f" ({self.origin}) renders the start of a conversation differently from the whole of it. Use a"
                    " template with {% generation %} around the assistant's text, or set mask_user_turns to false"
                )
        spans = tuple((len(b), len(u)) for b, u in zip(texts[::2], texts[1::2], strict=True))
        return _split_marked(text, spans) if self.reads.marks else Rendered(text, spans)

    def prompt(self, messages: Messages, where: str, variables: Variables = NONE) -> str:
        """Renders a conversation followed by the header of the assistant's next message.

        If it ends with an answer without calls, the prompt ends inside that answer.
        """
        *before, last = messages
        answer = last.get("content") if last["role"] == _ASSISTANT else None
        if not isinstance(answer, str) or any(last.get(key) for key in _CALLS):
            return MARKS.sub("", self._texts(messages, where, variables, [(len(messages), True)])[0])
        marked = [*before, {**last, "content": answer + _GOES_ON}]
        text = MARKS.sub("", self._texts(marked, where, variables, [(len(messages), False)])[0])
        text, mark, after = text.rpartition(_GOES_ON.strip())
        if not mark:
            raise ConfigError(
                f"{where}: the chat template ({self.origin}) leaves out the answer that the prompt ends with"
            )
        return text if after.startswith(" ") else text.rstrip()

    def _texts(
        self, messages: Messages, where: str, variables: Variables, until: Sequence[tuple[int, bool]]
    ) -> list[str]:
        """Args: until: see `Job`."""
        for number, message in enumerate(messages, start=1):
            self._check_message(message, f"{where}: message {number}")
        job = Job(self.text, {**self.names, "tools": None, **variables, "messages": list(messages)}, tuple(until))
        try:
            return RENDERER.render(job)
        except UnsuitableTextError as error:
            raise ConfigError(f"{where}: {error}") from error
        except RenderingError as error:
            raise ConfigError(f"{where}: the chat template ({self.origin}){error}") from error

    def _check_message(self, message: Mapping[str, Any], where: str) -> None:
        """Raises `ConfigError` for calls and parts of a content that templates leave out or write as Python does."""
        content, calls = message.get("content"), message.get("tool_calls") or []
        parts = [] if content is None or isinstance(content, str) else content
        for name, items in (("content", parts), ("tool_calls", calls)):
            given = items if isinstance(items, list) else [None]
            if not all(isinstance(item, Mapping) and isinstance(item.get("text", ""), str) for item in given):
                kinds = "a list of mappings" if name in _CALLS else "a text or a list of parts"
                raise ConfigError(f"{where}: {name}: {reprlib.repr(items)} given, {kinds} expected. Correct the record")
        given = [name for name in _CALLS if message.get(name)] + [str(part.get("type") or "text") for part in parts]
        unread = [name for name in given if name not in self.reads.keys]
        if unread:
            raise ConfigError(
                f"{where} has '{unread[0]}', which the chat template ({self.origin}) does not read. Set chat_template to one"
                " that does, or remove the record"
            )


@functools.cache
def _read_by(template: str) -> Reads:
    return Reads(*json.loads(RENDERER.render(Job(template, {}, ()))[0]))


def _named(name: str, tokenizer: Tokenizer, key: str) -> str:
    text, special_tokens = NAMED[name]
    vocabulary = tokenizer.vocabulary()
    missing = [token for token in special_tokens if token not in vocabulary]
    if missing:
        raise ConfigError(
            f"{key}: '{name}' given, which writes {missing[0]}, but the tokenizer has no such token. Add it to"
            " data.added_tokens or, for a tokenizer that is trained, to data.tokenizer.special_tokens; the template needs"
            f" {', '.join(special_tokens)}"
        )
    return text


def _read(path: str, tokenizer: Tokenizer, key: str) -> str:
    """The text of a .jinja file. The tokenizer of a checkpoint also has the files that were on the machine of its run."""
    try:
        return read_text(os.path.expanduser(path))
    except (OSError, UnicodeDecodeError) as error:
        if path in tokenizer.given_templates:
            return tokenizer.given_templates[path]
        raise ConfigError(f"{key}: '{path}' cannot be read: {error}") from error


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special token that the template writes after an assistant's turn; empty if it writes none."""
    text, end = _example(template)
    (ids, starts, _) = tokenizer.encode_with_offsets([text])[0]
    # Some decoders drop a space at the start of a text, so a token without text need not be special.
    after = [[int(i)] for i in ids[starts >= end]]
    special = [one[0] for one in after if not tokenizer.decode(one) and tokenizer.decode(one, special=True)]
    return tuple(special[:1])


def turn_end_texts(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Lists what the template writes after an assistant's turn, unless it is a special token; empty for white space."""
    text, end = _example(template)
    after = text[end:].strip()
    return (after,) if after and not turn_ends(template, tokenizer) else ()


def _example(template: ChatTemplate) -> tuple[str, int]:
    """A rendered conversation, and where the assistant's text ends in it.

    That is where two conversations end alike whose assistants say different things: the template may change what they say.
    """
    user = {"role": "user", "content": "a"}
    texts = [
        template.render([user, {"role": _ASSISTANT, "content": content}], "a conversation", mark=False).text
        for content in _ANSWERS
    ]
    alike = os.path.commonprefix([text[::-1] for text in texts])  # noqa: RUF071 - by character
    # A template that leaves the assistant's text out ends with nothing after it.
    return texts[0], len(texts[0]) - (0 if texts[0] == texts[1] else len(alike))


def with_templates(tokenizer: Tokenizer, names: Sequence[str], key: str) -> Tokenizer:
    """The tokenizer to save with a model that was trained with these templates (texts or paths of .jinja files).

    The last one becomes the tokenizer's own, and the token that it writes after an assistant's turn ends generated text,
    here and in transformers. Without any, the tokenizer stays as it is.
    """
    if not names:
        return tokenizer
    templates = {name: ChatTemplate.load(name, tokenizer, key) for name in names}
    default_template, ends = templates[names[-1]], ()
    with contextlib.suppress(ConfigError):  # a template need not render a conversation of two turns
        ends = turn_ends(default_template, tokenizer)
    files = {name: template.text for name, template in templates.items() if name != template.text}
    return tokenizer.with_chat_template(default_template.text, files, ends)


def _split_marked(marked: str, untrained: Sequence[tuple[int, int]]) -> Rendered:
    """Removes the marks around generated text. Spans are what is between them, without `untrained` ranges of `marked`."""
    parts, spans, size, begin, place = [], [], 0, None, 0
    for part in MARKS.split(marked):
        if part == BEGIN:
            begin = size if not any(start <= place < end for start, end in untrained) else None
        elif part == END:
            # An empty span would count a token that begins before it and ends after it.
            spans += [(begin, size)] if begin is not None and size > begin else []
        else:
            parts.append(part)
            size += len(part)
        place += len(part)
    return Rendered("".join(parts), tuple(spans))
