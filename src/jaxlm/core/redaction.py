"""Leaves secrets out of what a command prints, logs and saves: passwords and signatures in URLs, tokens, API keys.

A secret is recognized by where it is (`https://user:PASSWORD@host`, `?token=TOKEN`, `api_key: KEY`, `--password WORD`), by
the name of the environment variable that has it (`HF_TOKEN`), or by its form (`hf_...`). A secret of the configuration or of
the command line is recognized everywhere after that.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

MASK = "<redacted>"
_SHORTEST = 8  # characters of a secret that is masked wherever it occurs: shorter text occurs by chance

_WORDS = (
    r"(?:password|passwd|passphrase|secret|credential|signature|(?:api|access|private|secret)[-_]?key)s?"
    r"|access[-_]?key[-_]?id"
)
# Tokens of a vocabulary have names too, such as `pad_token`.
_TOKENS = r"(?:(?:hf|hub|auth|access|api|bearer|session|security|refresh|id|github|wandb)[-_]?)token"
_SECRET_KEY = re.compile(rf"(?:.*[-_])?(?:{_WORDS}|{_TOKENS})|token|authorization", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"(?:.*_)?(?:{_WORDS}|token)", re.IGNORECASE)
_KEY_VARIABLE = re.compile(r"(?:.*_)?(?:key|auth)", re.IGNORECASE)  # often a name, such as PROJECT_KEY
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*|[a-z_]+")
_WORD = re.compile(r"[A-Za-z]{1,19}")
# A port follows a colon too: `http://host:8000/a@b` has no password.
_PASSWORD = re.compile(r"(?<=://)([^\s/:@'\"]*):(?!\d{1,5}/)([^\s@'\"<>]+(?:@[^\s@/'\"<>]+)*)(?=@)")
_USER = re.compile(r"(?<=http://|ttps://)([^\s/:@'\"<>]+)(?=@)")  # a user without a password is a token
_PARAMETER = re.compile(
    r"((?:[?&]|&amp;)(?:[\w.%-]*(?:signature|credential|token|secret|password|passwd|api-?_?key|accesskeyid)|sig|key|auth)=)"
    r"([^&\s'\"<>#,;)\]}]+)",
    re.IGNORECASE,
)
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[opsru]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|A[KS]IA[A-Z0-9]{16}"
    r"|wandb_v1_\w{20,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)
# In YAML on the command line: `{type: mine, api_key: KEY}`.
_PAIR = re.compile(rf"(?:{_WORDS}|{_TOKENS})['\"]?:\s*(['\"]?)([^\s'\",}}\]]+)", re.IGNORECASE)
_OPTION = re.compile(r"--([\w.-]+)(?:=(.*))?", re.DOTALL)

_remembered: set[str] = set()


def redacted(text: str) -> str:
    """The text without its secrets."""
    return _masked(text, _remembered | set(_of_environment(_SECRET_VARIABLE)) | set(_of_environment(_KEY_VARIABLE)))


def _masked(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, quote(secret, safe=""), quote(secret)}:
            text = text.replace(form, MASK)
    text = _PASSWORD.sub(rf"\1:{MASK}", text)
    text = _USER.sub(MASK, text)
    text = _PARAMETER.sub(rf"\1{MASK}", text)
    return _FORMS.sub(MASK, text)


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
    if _is_secret(key, value):
        return MASK
    return _masked(value, _remembered | set(_of_environment(_SECRET_VARIABLE)))


def remember_secrets(value: Any, key: str = "") -> None:
    """Recognizes the secrets of a configuration from now on. Args: value: plain values; key: of the value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            remember_secrets(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            remember_secrets(item, key)
    elif isinstance(value, str):
        secrets = [value] if _is_secret(key, value) else [*_in_urls(value)]
        forms = (form for secret in secrets for form in (secret, unquote(secret)))
        _remembered.update(form for form in forms if _can_be_found(form))


def command_line() -> list[str]:
    """The arguments of the command line. From now on, this process prints no secrets, and libraries that record the command
    line (wandb) find it without them."""
    arguments = sys.argv[1:]
    for key, word in _with_keys(arguments):
        remember_secrets(word, key)
        remember_secrets([match[2] for match in _PAIR.finditer(word)], "secret")
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


def _is_secret(key: str, value: str) -> bool:
    """Whether the key says so. The name of the variable that has a key (`api_key_variable`) is not a secret, unless it
    holds the key itself by mistake."""
    name = key.rpartition(".")[2]
    if name.endswith("_variable"):
        return _SECRET_KEY.fullmatch(name.removesuffix("_variable")) is not None and not _VARIABLE.fullmatch(value)
    return _SECRET_KEY.fullmatch(name) is not None


def _in_urls(text: str) -> Iterator[str]:
    for pattern in (_PASSWORD, _PARAMETER):
        yield from (match[2] for match in pattern.finditer(text))


def _of_environment(names: re.Pattern[str]) -> Iterator[str]:
    for name, value in os.environ.items():
        if names.fullmatch(name) and _can_be_found(value):
            yield value


@functools.cache
def _can_be_found(secret: str) -> bool:
    """Whether this text hardly occurs by chance: it is not short, a word, or the path of a file that has the secret."""
    if len(secret) < _SHORTEST or _WORD.fullmatch(secret):
        return False
    return not (secret[0] in "./~" and os.path.exists(os.path.expanduser(secret)))
