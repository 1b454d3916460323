"""Options of commands that say how text is written, and with which adapters."""

import argparse

from jaxlm.models.inference.generate import CACHE_DTYPES, GenerationConfig


def add_generation_options(parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: float) -> None:
    """The options that `generation_config_of` reads, with their defaults."""
    parser.add_argument(
        "--max_new_tokens", type=int, default=max_new_tokens, help=f"at the most (default {max_new_tokens})"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        help=f"0 takes the likeliest token (default {temperature:g})",
    )
    parser.add_argument("--top_k", type=int, default=None, help="choose among so many of the likeliest tokens")
    parser.add_argument(
        "--top_p", type=float, default=None, help="choose among the likeliest that make up this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    parser.add_argument(
        "--cache_dtype",
        choices=CACHE_DTYPES,
        default=None,
        help="of keys and values that are kept; int8 needs the least memory (default: the parameters')",
    )
    add_adapter_option(parser)


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """The option whose value `open_model` takes as `adapter`."""
    parser.add_argument(
        "--adapter", default=None, help="a PEFT folder with LoRA adapters, which are folded into the model"
    )


def generation_config_of(options: argparse.Namespace, stop_ids: tuple[int, ...]) -> GenerationConfig:
    """What the options of `add_generation_options` say."""
    return GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_ids=stop_ids,
        cache_dtype=options.cache_dtype,
    )
