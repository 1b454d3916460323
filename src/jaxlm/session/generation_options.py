"""Command-line options for text generation, tools, adapters and quantization."""

import argparse
from dataclasses import dataclass
from typing import get_args

from jaxlm.core.errors import ConfigError, check_at_least
from jaxlm.core.field_types import check_fields
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.inference.denoise import DenoisingConfig, PassSchedule, Remasking
from jaxlm.models.inference.generate import CACHE_DTYPES, GenerationConfig
from jaxlm.models.inference.quantized import FORMATS
from jaxlm.models.inference.tools.calls import TOOL_TOKENS, Tool, ToolCalls, ToolTokens
from jaxlm.reading.choices import is_import_path
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource, parse_value

_NO_TOOL, _DEFAULT_TOOL = "none", "calculator"


def add_generation_options(parser: argparse.ArgumentParser, *, max_new_tokens: int | None, temperature: float) -> None:
    """Adds the options that `generation_config_of` reads."""
    add = parser.add_argument
    most = f"maximum number of tokens to generate (default {max_new_tokens or 128}, or what fits)"
    add("--max_new_tokens", type=int, default=max_new_tokens, help=most)
    greedy = f"sampling temperature; 0 decodes greedily (default {temperature:g})"
    add("--temperature", type=float, default=temperature, help=greedy)
    only = "sample only from"
    add("--top_k", type=int, help=f"{only} the TOP_K most likely tokens (default: all)")
    add("--top_p", type=float, help=f"{only} the most likely tokens whose probabilities add up to TOP_P (default: all)")
    min_p = f"{only} tokens with at least MIN_P times the most likely token's probability (default: all)"
    add("--min_p", type=float, help=min_p)
    penalty = "divides the logits of tokens that the text has so far, and multiplies negative ones (default 1: none)"
    add("--repetition_penalty", type=float, default=1.0, help=penalty)
    add("--seed", type=int, default=0, help="random seed; the same seed generates the same text (default 0)")
    cache_dtype = "dtype of the KV cache; int8 uses the least memory (default: that of the activations)"
    add("--cache_dtype", choices=CACHE_DTYPES, help=cache_dtype)
    add(
        "--tool",
        help=f"tool that answers what the model writes between {TOOL_TOKENS[0]} and {TOOL_TOKENS[1]}:"
        f" {_DEFAULT_TOOL}, none, or a class of your own, package.module:Class; or with keys, as in"
        f" '{{type: {_DEFAULT_TOOL}, max_exponent: 9}}' (default: {_DEFAULT_TOOL}, if the tokenizer has these tokens)",
    )
    add_adapter_option(parser)
    add_quantize_option(parser)


def add_quantize_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--quantize`, the value for `LoadedModel.for_inference`."""
    parser.add_argument(
        "--quantize",
        choices=FORMATS,
        help="store the weights of linear layers and experts as int8, with a scale per output channel (default: no)",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--adapter`, the value for `open_model`."""
    parser.add_argument("--adapter", help="PEFT folder with LoRA adapters to merge into the model")


def add_denoising_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `denoising_of` reads."""
    add = parser.add_argument
    passes = "passes in which a masked-diffusion model fills in the new tokens (default: as many as new tokens)"
    add("--num_steps", type=int, help=passes)
    block = "new tokens that it fills in before it goes on to those after them (default: all)"
    add("--block_length", type=int, help=block)
    kept = "which of its predictions it keeps in each pass (default: low_confidence, the most likely ones)"
    add("--remasking", choices=get_args(Remasking), help=kept)
    add(
        "--schedule",
        choices=get_args(PassSchedule),
        help="how many tokens each pass fills in: equal numbers, or depth, with a pass for each part of the model that has a"
        " noise of its own (default: equal)",
    )


def denoising_of(options: argparse.Namespace) -> DenoisingConfig | None:
    """The options from `add_denoising_options`; None if none is given. Raises `ConfigError` if one is out of range."""
    names = ("num_steps", "block_length", "remasking", "schedule")
    if not (given := {name: value for name in names if (value := getattr(options, name)) is not None}):
        return None
    check_fields(config := DenoisingConfig(**given), "--")
    return config


def generation_config_of(options: argparse.Namespace, stop_ids: tuple[int, ...]) -> GenerationConfig:
    """The options from `add_generation_options`. Raises `ConfigError` if `--max_new_tokens` is below 1."""
    check_at_least("--max_new_tokens", options.max_new_tokens, 1)
    return GenerationConfig.of(options, stop_ids=stop_ids)


def tool_calls_of(options: argparse.Namespace, tokenizer: Tokenizer) -> ToolCalls | None:
    """Returns what answers the model's tool calls, by the option `--tool`; None if nothing does.

    Raises:
        ConfigError: there is no such tool, or the tokenizer has no tokens for calls.
    """
    name = options.tool or _DEFAULT_TOOL
    if name == _NO_TOOL or (options.tool is None and ToolTokens.of(tokenizer.vocabulary()) is None):
        return None
    return ToolCalls.of(_tool(name), tokenizer, f"--tool: '{name}'")


@dataclass(frozen=True)
class _ToolOption:
    tool: Tool


def _tool(text: str) -> Tool:
    """The tool of a name, or of a mapping with `type` and keys."""
    section = parse_value(text) if text.lstrip().startswith("{") else {"type": text}
    name, known = section.get("type"), Tool.get_known_choices()
    if name not in known and not is_import_path(name):
        allowed = ", ".join(sorted((*known, _NO_TOOL)))
        raise ConfigError(f"--tool: '{name or text}' given. Allowed: {allowed}, or package.module:Class")
    try:
        return decode(_ToolOption, ConfigSource({"tool": section})).tool
    except ConfigError as error:
        raise ConfigError(f"--{error}") from error
