"""Special tokens that are added to an existing tokenizer, such as those of a chat template."""

from collections.abc import Sequence

from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

_KEY = "data.added_tokens"
_TOKENIZER = "tokenizer.json"


def open_tokenizer(path: str, added: Sequence[str], vocab_size: int | None) -> Tokenizer:
    """Loads a tokenizer and adds special tokens to it. Their ids follow those that it has.

    Args:
        vocab_size: the size that it must have with them; None accepts any.

    Raises:
        ConfigError: as `load_tokenizer`; or one of the tokens is not new.
    """
    if not added:
        return load_tokenizer(path, vocab_size)
    grown = with_added_tokens(load_tokenizer(path), added)
    if vocab_size not in (None, grown.vocab_size):
        raise ConfigError(
            f"data.vocab_size: {vocab_size} given, but with {_KEY} the tokenizer {path} has {grown.vocab_size} tokens. Remove"
            f" vocab_size, or set it to {grown.vocab_size}"
        )
    return grown


def with_added_tokens(tokenizer: Tokenizer, added: Sequence[str]) -> Tokenizer:
    """The tokenizer with more special tokens. Raises `ConfigError` if one of them is not new."""
    import tokenizers

    known = tokenizer.vocabulary()
    for number, token in enumerate(added):
        if not token or token != token.strip():
            raise ConfigError(f"{_KEY}: {token!r} given, a text without white space around it expected")
        if token in added[:number]:
            raise ConfigError(f"{_KEY}: '{token}' is given twice. Remove one of them")
        if token in known:
            raise ConfigError(f"{_KEY}: '{token}' is a token already, with the id {known[token]}. Remove it")
    files = tokenizer.files()
    backend = tokenizers.Tokenizer.from_str(files.pop(_TOKENIZER).decode("utf-8"))
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in added])
    ids = [backend.token_to_id(token) for token in added]
    if ids != list(range(tokenizer.vocab_size, tokenizer.vocab_size + len(added))):
        raise ConfigError(
            f"{_KEY}: the new tokens got the ids {ids}, but the tokenizer's last id is {tokenizer.vocab_size - 1}: its ids"
            " have gaps. Give it a tokenizer.json without gaps"
        )
    return Tokenizer(backend, tokenizer.bos_id, tokenizer.eos_id, files)
