"""The process that renders chat templates. It imports nothing of jaxlm, so that it starts in a moment.

A template is a program of whoever published the tokenizer. Jinja's sandbox keeps it from files and from Python, but not from
running forever or from filling the memory. So it runs in a process of its own, which the operating system limits in time
and memory, whatever the template does.
"""

import contextlib
import functools
import json
import pickle
import re
import resource
import signal
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

# Unicode noncharacters, which text must not contain. They mark where `{% generation %}` blocks begin and end.
BEGIN, END = "\ufdd0", "\ufdd1"
MARKS = re.compile(f"([{BEGIN}{END}])")
# The first byte of a message says what follows it.
TEXT, SYNTAX, FAILED, TOO_LARGE, INVALID = b"t", b"s", b"f", b"l", b"i"
GIVEN = ("messages", "tools", "add_generation_prompt")  # variables that no record sets
_MAX_MESSAGE = 500  # characters
# What gives another text every time.
_RANDOM_GLOBALS, _RANDOM_FILTERS = ("lipsum",), ("random",)


class Limits(NamedTuple):
    """Limits what rendering a conversation may need.

    Attributes:
        cpu_s: seconds of a CPU, so that a busy machine makes no difference.
        memory: bytes of the process.
        characters: of a rendered text.
    """

    cpu_s: float = 10.0
    memory: int = 2 << 30
    characters: int = 64 << 20


class Job(NamedTuple):
    """Says what to render.

    Attributes:
        template: the Jinja template.
        variables: of the template.
        until: for each text: how many of the messages it has, and whether the header of the next answer follows. Without
            any, the answer is what the template `Reads`, as JSON.
    """

    template: str
    variables: dict[str, Any]
    until: tuple[tuple[int, bool], ...]


class Reads(NamedTuple):
    """Lists what a template reads.

    Attributes:
        variables: beside those that it sets.
        keys: of messages, tools and contents, or values that it compares with. What it writes is none of them.
        marks: whether it puts `{% generation %}` around the assistant's text.
    """

    variables: Collection[str]
    keys: Collection[str]
    marks: bool


class ToolArguments(dict):
    """Holds a call's arguments: a mapping for templates with `tojson`, and its JSON for those that write what they get."""

    def __init__(self, values: dict[str, Any], text: str):
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, after: str) -> str:
        return self.text + after

    def __radd__(self, before: str) -> str:
        return before + self.text


def serve(descriptor: int) -> None:
    """Renders what comes through the connection, until it is closed."""
    # Ctrl-C in a terminal, or a scheduler, tells the run to stop, which still renders what it has begun.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process; the run may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    _limit(resource.RLIMIT_CORE, 0)
    with Connection(descriptor) as connection:
        while True:
            try:
                limits, job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            _limit(resource.RLIMIT_AS, limits.memory)
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            for message in _answers(job, limits):
                connection.send_bytes(message)
            signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS limits no address space
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answers(job: Job, limits: Limits) -> Iterator[bytes]:
    import jinja2

    try:
        template = _compiled(job.template)
        inputs = [job.variables.get(name) for name in ("messages", "tools")]
        if MARKS.search(json.dumps(inputs, ensure_ascii=False, default=str)):
            yield INVALID + b"the text contains U+FDD0 or U+FDD1, which are Unicode noncharacters. Remove them"
            return
        for number, is_prompt in job.until:
            given = dict(
                zip(GIVEN, (job.variables["messages"][:number], job.variables.get("tools"), is_prompt), strict=True)
            )
            parts, size = [], 0
            for part in template.generate({"documents": None} | job.variables | given):
                parts.append(part)
                size += len(part)
                if size > limits.characters:
                    yield TOO_LARGE + f"a text of more than {limits.characters:,} characters".encode()
                    return
            yield TEXT + "".join(parts).encode("utf-8")
        if not job.until:
            yield TEXT + json.dumps(_reads(job.template)).encode()
    except jinja2.TemplateSyntaxError as error:
        yield SYNTAX + f"line {error.lineno}: {error.message}"[:_MAX_MESSAGE].encode("utf-8", "replace")
    except MemoryError:
        yield TOO_LARGE + f"more than {limits.memory / 2**30:g} GiB of memory".encode()
    except Exception as error:  # a template may raise whatever Python's operators and methods raise
        message = f"{type(error).__name__}: {error}".removesuffix(": ")
        yield FAILED + message[:_MAX_MESSAGE].encode("utf-8", "replace")


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Any:
    return _environment().from_string(text)


def _reads(text: str) -> Reads:
    from jinja2 import meta, nodes

    tree = _environment().parse(text)
    written = tree.find_all((nodes.Output, nodes.Add, nodes.Concat))
    output = {id(child) for node in written for child in node.iter_child_nodes()}
    keys = {node.attr for node in tree.find_all(nodes.Getattr)}
    keys |= {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str) and id(n) not in output}
    marks = tree.find(nodes.ExtensionAttribute) is not None
    return Reads(sorted(meta.find_undeclared_variables(tree)), sorted(keys), marks)


@functools.cache
def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}`: puts marks around its content."""

        tags = {"generation"}  # noqa: RUF012  (Jinja reads a plain attribute)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    for name in _RANDOM_GLOBALS:
        del environment.globals[name]
    for name in _RANDOM_FILTERS:
        del environment.filters[name]
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
