"""What the other files of a Hugging Face folder change in its tokenizer.json, as transformers applies them.

Tokens that these files add get the ids after those of tokenizer.json, or keep the id that they have there.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxlm.core.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Classes that build the steps around the vocabulary anew, and the types of models that use them. Others take tokenizer.json
# as it is, whatever class the settings name.
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
_BYTE_LEVEL = tuple(
    f"{name}Tokenizer" for name in ("GPT2", "GPTNeoX", "Qwen2", "Qwen3_5", "Cohere", "CodeGen", "Roberta")
)
_QWEN = (
    "qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next"
    " qwen3_vl qwen3_vl_moe"
)
_TYPES = (
    "arcee code_llama cohere cohere2 cwm deepseek_v3 exaone4 gemma4_text gpt2 gpt_neo gpt_neox gpt_oss gptj helium"
    " hunyuan_v1_dense jaxlm_dba kimi_k2 llama mistral4 mpt olmo olmoe opt phi roberta seed_oss smollm3 starcoder2"
)
REBUILT = (None, *f"{_TYPES} {_QWEN}".split())


def with_text_level(model: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json. A multimodal model has those about tokens at the top or among those of its text model."""
    inner = model.get("text_config")
    return {**(inner if isinstance(inner, Mapping) else {}), **model}


def add_folder_settings(
    backend: "tokenizers.Tokenizer",
    settings: Mapping[str, Any],
    added: Mapping[str, Any],
    special: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    rebuild: bool = True,
) -> None:
    """Gives the tokenizer the tokens, the prefix and the decoder of these files.

    Args:
        settings, added, special, model: the content of tokenizer_config.json, added_tokens.json, special_tokens_map.json and
            config.json.
        rebuild: whether the class in the settings may replace the steps of tokenizer.json.

    Raises:
        ConfigError: a token is to have an id that it does not get.
    """
    if rebuild and model.get("model_type") in REBUILT:
        _build_again(backend, settings)
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


def template_in(settings: Mapping[str, Any]) -> str | None:
    """The chat template in the content of tokenizer_config.json; of several, the one named `default`; None without any."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template


def _token(given: Any, *, special: bool = True) -> "tokenizers.AddedToken":
    import tokenizers

    if isinstance(given, Mapping):
        return tokenizers.AddedToken(given["content"], **{key: given[key] for key in _FLAGS if key in given})
    return tokenizers.AddedToken(given, special=special)


def _build_again(backend: "tokenizers.Tokenizer", settings: Mapping[str, Any]) -> None:
    from tokenizers import decoders, models, pre_tokenizers

    name, prefix = (settings.get("tokenizer_class") or "").removesuffix("Fast"), settings.get("add_prefix_space")
    given = backend.pre_tokenizer
    steps = [*(given if isinstance(given, pre_tokenizers.Sequence) else [given])]
    byte_level = [step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)]
    if name in _BYTE_LEVEL:
        for step in byte_level:
            step.add_prefix_space = prefix is True
    elif name in _LLAMA and not byte_level and isinstance(backend.model, models.BPE):
        is_code = name == _LLAMA[1]
        scheme = "never" if prefix is False else "always" if settings.get("legacy") and not is_code else "first"
        backend.normalizer, backend.model.fuse_unk, backend.model.byte_fallback = None, True, True
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme, split=False)
        strip = [] if prefix is False and not is_code else [decoders.Strip(" ", left=1)]
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        backend.decoder = decoders.Sequence(steps)
