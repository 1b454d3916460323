"""Leaves secrets out of what a command prints, logs and saves: passwords and signatures in URLs, tokens, API keys.

A secret is recognized by where it is (`https://user:PASSWORD@host`, `?token=TOKEN`, `api_key: KEY`, `--password WORD`), by
the name of the environment variable that has it (`HF_TOKEN`), or by its form (`hf_...`). A secret of the configuration or of
the command line is recognized everywhere after that.

All text that is written for people passes here: lines of logs, what trackers get, and files by `write_text`.
"""

import dataclasses
import functools
import html
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

MASK = "<redacted>"
_SHORTEST = 8  # characters of a secret that is masked wherever it occurs: shorter text occurs by chance

# Names in snake case: of keys, of query parameters, and of variables.
_WORDS = (
    r"password|passwd|passphrase|secret|credential|signature|connection_?string"
    r"|(?:api|access|account|private|secret|signing|storage)_?key"
)
_TOKENS = r"(?:hf|hub|auth|access|api|bearer|session|security|refresh|id|github|wandb|sas)_?token"
_SECRET_NAME = re.compile(rf".*(?:{_WORDS})s?|.*access_?key_?id|(?:.*_)?{_TOKENS}|authorization")
_SECRET_VARIABLE = re.compile(rf".*(?:(?:{_WORDS})s?|access_?key_?id|token|_pass|_pwd)_?\d*")
_KEY_VARIABLE = re.compile(r"(?:.*_)?(?:key|auth)")  # often a name, such as PROJECT_KEY
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*|[a-z_]+")
_WORD = re.compile(r"[A-Za-z]{1,19}")
_RANDOM = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[\w.~+/=-]{16,}")  # no token of a vocabulary, such as `pad_token`
# A port follows a colon too: `http://host:8000/a@b` has no password.
_PASSWORD = re.compile(r"(?<=://)([^\s/:@'\"\\]*):(?!(?:80|443|\d{4,5})/)([^\s@'\"<>\\]+(?:@[^\s@/'\"<>\\]+)*)(?=@)")
_USER = re.compile(r"(https?://)[^\s/:@'\"<>\\]+(?=@)", re.IGNORECASE)  # a user without a password is a token
_PARAMETER = re.compile(r"([?&#]|&amp;)([\w.%-]+)=([^&\s'\"<>#,;)\]}\\]+)")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[opsru]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|A[KS]IA[A-Z0-9]{16}"
    r"|wandb_v1_\w{20,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)
# In YAML on the command line: `{type: mine, api_key: KEY}`.
_PAIR = re.compile(r"([\w.-]+)['\"]?:\s*['\"]?([^\s'\",}\]]+)")
_OPTION = re.compile(r"--([\w.-]+)(?:=(.*))?", re.DOTALL)

_remembered: set[str] = set()


def redacted(text: str) -> str:
    """The text without its secrets."""
    return _masked(text, _secrets(names_too=True))


def redact(value: Any) -> Any:
    """Removes the secrets from texts in a value. Args: value: a text, or a dataclass, mapping or sequence that has some."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redact(name): redact(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: redact(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def redacted_bytes(content: bytes) -> bytes:
    """Removes the secrets from the content of a file."""
    return redacted(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def write_text(path: Path, text: str) -> None:
    """Writes a file for people."""
    path.write_text(redacted(text), encoding="utf-8", errors="replace")


def _masked(text: str, secrets: frozenset[str]) -> str:
    if secrets:
        text = _any_of(secrets).sub(MASK, text)
    text = _PASSWORD.sub(rf"\1:{MASK}", text)
    text = _USER.sub(rf"\1{MASK}", text)
    text = _PARAMETER.sub(lambda found: f"{found[1]}{found[2]}={MASK}" if _is_parameter(found[2]) else found[0], text)
    return _FORMS.sub(MASK, text)


@functools.lru_cache(maxsize=8)
def _any_of(secrets: frozenset[str]) -> re.Pattern[str]:
    """Finds secrets in texts, URLs, JSON and HTML."""
    written = (lambda text: quote(text, safe=""), quote, html.escape, lambda text: json.dumps(text)[1:-1])
    forms = {*secrets, *(form(secret) for secret in secrets for form in written)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))


def without_secrets(value: Any, key: str = "") -> Any:
    """A configuration as plain values without its secrets. Args: key: of the value.

    Variables such as PROJECT_KEY are often names. They stay, because paths that have them must stay right.
    """
    if isinstance(value, Mapping):
        names = {name: redacted(name) if isinstance(name, str) else name for name in value}
        return {names[name]: without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    if not isinstance(value, str):
        return value
    return MASK if _is_secret(key, value) else _masked(value, _secrets(names_too=False))


def remember_secrets(value: Any, key: str = "") -> None:
    """Recognizes the secrets of a configuration from now on. Args: value: plain values; key: of the value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            remember_secrets(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            remember_secrets(item, key)
    elif isinstance(value, str):
        in_urls = [match[2] for match in _PASSWORD.finditer(value)]
        in_urls += [match[3] for match in _PARAMETER.finditer(value) if _is_parameter(match[2])]
        secrets = [value] if _is_secret(key, value) else in_urls
        forms = (form for secret in secrets for form in (secret, unquote(secret)))
        _remembered.update(form for form in forms if _can_be_found(form))


def command_line() -> list[str]:
    """The arguments of the command line. From now on, this process prints no secrets, and libraries that record the command
    line (wandb) find it without them."""
    arguments = sys.argv[1:]
    for key, word in _with_keys(arguments):
        remember_secrets(word, key)
        for pair in _PAIR.finditer(word):
            remember_secrets(pair[2], pair[1])
    sys.argv[1:] = redacted_arguments(arguments)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        if not isinstance(stream.write, _RedactedWrite):
            stream.write = _RedactedWrite(stream.write)
    return arguments


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets, also those that are too short to be recognized elsewhere."""
    words = []
    for key, word in _with_keys(arguments):
        value = word.partition("=")[2] if key and word.startswith("--") else word
        prefix = word.removesuffix(value)
        words.append(prefix + MASK if value and _is_secret(key, value) else redacted(word))
    return words


class _RedactedWrite:
    """Takes the place of a stream's `write`: not of the stream, which handlers of logs have already."""

    def __init__(self, write: Callable[[str], int]):
        self._write = write

    def __call__(self, text: str) -> int:
        self._write(redacted(text))
        return len(text)


def _with_keys(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, word) of each word: the key that `--key word` or `--key=word` gives it; empty if there is none."""
    key = ""
    for word in arguments:
        option = _OPTION.fullmatch(word)
        yield (key, word) if option is None else (option[1] if option[2] is not None else "", word)
        key = option[1] if option is not None and option[2] is None else ""


@functools.lru_cache(maxsize=1024)
def _snake(name: str) -> str:
    """`clientSecret`, `x-api-key` and `MY_TOKEN` in snake case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def _is_secret(key: str, value: str) -> bool:
    """Tells whether a value is secret according to its key. The name of the variable that has a key (`api_key_variable`)
    is not a secret, unless it holds the key itself by mistake."""
    name = _snake(key.rpartition(".")[2])
    if name.endswith("_variable"):
        return _SECRET_NAME.fullmatch(name.removesuffix("_variable")) is not None and not _VARIABLE.fullmatch(value)
    if name == "token":  # or an axis with this name
        return _can_be_found(value)
    return _SECRET_NAME.fullmatch(name) is not None or (name.endswith("token") and _RANDOM.fullmatch(value) is not None)


def _is_parameter(name: str) -> bool:
    name = _snake(name)
    return name in ("sig", "key", "auth", "code") or name.endswith("token") or _SECRET_NAME.fullmatch(name) is not None


def _secrets(*, names_too: bool) -> frozenset[str]:
    """Collects the secrets of the configuration and the environment. Args: names_too: also what may be a name."""
    kinds = ((value, _kind_of(name)) for name, value in os.environ.items())
    found = (value for value, kind in kinds if kind == 2 or (kind and (names_too or _RANDOM.fullmatch(value))))
    return frozenset((*_remembered, *filter(_can_be_found, found)))


@functools.cache
def _kind_of(variable: str) -> int:
    """2 for a variable with a secret, 1 for one that may have a name."""
    name = variable.lower()
    return 2 if _SECRET_VARIABLE.fullmatch(name) else int(_KEY_VARIABLE.fullmatch(name) is not None)


@functools.cache
def _can_be_found(secret: str) -> bool:
    """Tells whether a text hardly occurs by chance: it is not short, a word, or the path of a file that has the secret."""
    if len(secret) < _SHORTEST or _WORD.fullmatch(secret):
        return False
    return not (secret[0] in "./~" and os.path.exists(os.path.expanduser(secret)))
