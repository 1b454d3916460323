"""What the other files of a Hugging Face folder change in its tokenizer.json, as transformers applies them.

Tokens that these files add get the ids after those of tokenizer.json, or keep the id that they have there.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxlm.core.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Classes that take tokenizer.json as it is; the others build the steps before the vocabulary anew.
_AS_IT_IS = (None, "PreTrainedTokenizerFast", "TokenizersBackend")


def with_folder_settings(
    backend: "tokenizers.Tokenizer", settings: Mapping[str, Any], added: Mapping[str, Any], special: Mapping[str, Any]
) -> "tokenizers.Tokenizer":
    """The tokenizer with the tokens and the prefix of these files.

    Args:
        settings, added, special: the content of tokenizer_config.json, added_tokens.json and special_tokens_map.json.

    Raises:
        ConfigError: a token is to have an id that it does not get.
    """
    import tokenizers

    prefix = settings.get("add_prefix_space")
    if isinstance(prefix, bool) and settings.get("tokenizer_class") not in _AS_IT_IS:
        content = json.loads(backend.to_str())
        for step in _steps(content.get("pre_tokenizer")):
            if step["type"] == "ByteLevel":
                step["add_prefix_space"] = prefix
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    decoder = settings.get("added_tokens_decoder")
    names = settings if decoder is not None else {**special, **settings}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or []
    named = [_token(names[key]) for key in _NAMED if names.get(key)]
    extras = [_token(one) for one in (extra.values() if isinstance(extra, Mapping) else extra)]
    if decoder is not None:
        numbered = {int(number): _token(one) for number, one in decoder.items()}
    else:
        are_special = {token.content for token in (*named, *extras)}
        numbered = {number: _token(text, special=text in are_special) for text, number in added.items()}
    tokens = [token for _, token in sorted(numbered.items(), key=lambda pair: pair[0])]
    contents = {token.content for token in (*tokens, *backend.get_added_tokens_decoder().values())}
    if any(token.content not in contents for token in extras):
        tokens += [token for token in (*named, *extras) if token.content not in contents]
    backend.add_tokens(tokens)
    for number, token in numbered.items():
        if (got := backend.token_to_id(token.content)) != number:
            raise ConfigError(
                f"data.tokenizer: '{token.content}' is to have the id {number}, but tokenizer.json leads to {got}. Download"
                " the tokenizer's files again"
            )
    return backend


def _token(given: Any, *, special: bool = True) -> "tokenizers.AddedToken":
    import tokenizers

    if isinstance(given, Mapping):
        return tokenizers.AddedToken(given["content"], **{key: given[key] for key in _FLAGS if key in given})
    return tokenizers.AddedToken(given, special=special)


def _steps(pre_tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The parts of a sequence of pre-tokenizers."""
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        for one in pre_tokenizer["pretokenizers"]:
            yield from _steps(one)
    elif pre_tokenizer:
        yield pre_tokenizer
