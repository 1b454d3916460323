"""Command-line options for text generation, adapters and quantization."""

import argparse

from jaxlm.models.inference.generate import CACHE_DTYPES, GenerationConfig
from jaxlm.models.inference.quantized import FORMATS


def add_generation_options(parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: float) -> None:
    """Adds the options that `generation_config_of` reads."""
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=max_new_tokens,
        help=f"maximum number of tokens to generate (default {max_new_tokens})",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        help=f"sampling temperature; 0 decodes greedily (default {temperature:g})",
    )
    parser.add_argument(
        "--top_k", type=int, default=None, help="sample only from the TOP_K most likely tokens (default: all)"
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=None,
        help="sample only from the most likely tokens whose probabilities add up to TOP_P (default: all)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed; the same seed generates the same text (default 0)"
    )
    parser.add_argument(
        "--cache_dtype",
        choices=CACHE_DTYPES,
        default=None,
        help="dtype of the KV cache; int8 uses the least memory (default: the parameters' dtype)",
    )
    add_adapter_option(parser)
    add_quantize_option(parser)


def add_quantize_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--quantize`, the value for `LoadedModel.for_inference`."""
    parser.add_argument(
        "--quantize",
        choices=FORMATS,
        default=None,
        help="store the weights of linear layers and experts as int8, with a scale per output channel (default: no)",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--adapter`, the value for `open_model`."""
    parser.add_argument("--adapter", default=None, help="PEFT folder with LoRA adapters to merge into the model")


def generation_config_of(options: argparse.Namespace, stop_ids: tuple[int, ...]) -> GenerationConfig:
    """The generation config of the options from `add_generation_options`."""
    return GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_ids=stop_ids,
        cache_dtype=options.cache_dtype,
    )
