"""Continues prompts with the model of a checkpoint or a Hugging Face folder.

jaxlm sample --checkpoint checkpoints/quickstart --prompt "def " --prompt "import "

A masked-diffusion model fills in the new tokens in any order, in --num_steps passes.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from jaxlm.core.errors import ConfigError
from jaxlm.models.inference.denoise import denoised
from jaxlm.models.inference.generate import default_new_tokens, generate_tokens
from jaxlm.models.inference.sampling import StopStrings
from jaxlm.models.inference.unstacked import Generator
from jaxlm.session.exit_codes import command
from jaxlm.session.generation_options import (
    add_denoising_options,
    add_generation_options,
    denoising_of,
    generation_config_of,
    tool_calls_of,
)
from jaxlm.session.load_model import checkpoint_parser, open_model, parse_with_keys


@command
def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options, keys = parse_with_keys(_parser(), arguments)
    stop_strings = options.stop or []
    if "" in stop_strings:
        raise ConfigError("--stop: '' given, but a stop string must not be empty. Set a stop string, or remove --stop")
    loaded = open_model(options.checkpoint, keys, options.adapter, options.weights)
    tokenizer, prompts = loaded.tokenizer, options.prompt or [""]
    ids = [loaded.prompt_ids(prompt) for prompt in prompts]
    if options.max_new_tokens is None:
        options.max_new_tokens = default_new_tokens(ids, loaded.model.seq_len)
    calls = tool_calls_of(options, tokenizer)
    of_text = StopStrings.of_text(stop_strings, tokenizer.decode)
    config, denoising = generation_config_of(options, tokenizer.stop_ids), denoising_of(options)
    stops = of_text if calls is None else StopStrings(stop_strings, calls.fragments)

    with loaded.plan.layout.use():
        model = loaded.for_inference(options.quantize)
        started = time.perf_counter()
        if model.is_causal and denoising is None:
            completions = generate_tokens(Generator.of(model), ids, config, stops.until, calls)
        else:
            completions = denoised(model, ids, config, tokenizer.mask_id, denoising)
        seconds = time.perf_counter() - started
    for note in model.traits.notes:
        print(f"note: {note}", file=sys.stderr)
    for prompt, new_ids in zip(prompts, completions, strict=True):
        print(prompt + stops.before(new_ids), end="\n---\n")
    count = sum(map(len, completions))
    rate = f"{count / seconds:.1f} tokens/s, including compilation"
    print(f"{count} tokens in {seconds:.1f} s ({rate}), from {loaded.location}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = checkpoint_parser(
        "sample",
        "Generates completions of prompts with a trained model. You can override keys of the saved configuration:"
        " --trainer.mp f32.",
        or_else="; or a Hugging Face folder, or a hub repository name or name@revision",
    )
    parser.add_argument("--prompt", action="append", help="prompt to complete; may be repeated")
    parser.add_argument("--stop", action="append", help="string that ends a completion; may be repeated")
    add_generation_options(parser, max_new_tokens=None, temperature=0.8)
    add_denoising_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
