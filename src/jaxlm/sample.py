"""A checkpoint, or a Hugging Face folder, to text.

python -m jaxlm.sample --checkpoint checkpoints/quickstart --prompt "def " --prompt "import "
"""

import argparse
import sys
import time
from collections.abc import Sequence

from jaxlm.core.errors import ConfigError
from jaxlm.evals.samples import prompt_ids
from jaxlm.models.inference.generate import generate_tokens
from jaxlm.models.inference.stop_strings import StopStrings
from jaxlm.models.inference.unstacked import Generator
from jaxlm.run.exit_codes import run_command
from jaxlm.run.generation_options import add_generation_options, generation_config_of
from jaxlm.run.load_model import checkpoint_parser, open_model, parse_with_keys


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return run_command(lambda: _sample(sys.argv[1:] if arguments is None else arguments))


def _parser() -> argparse.ArgumentParser:
    parser = checkpoint_parser(
        "jaxlm.sample",
        "Continues prompts with a trained model. Keys of the saved configuration may follow: --trainer.mp f32.",
        or_else="; or a folder of Hugging Face, or the hub's name or name@revision",
    )
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--stop", action="append", help="text that ends a continuation; may be given several times")
    add_generation_options(parser, max_new_tokens=128, temperature=0.8)
    return parser


def _sample(arguments: Sequence[str]) -> int:
    options, keys = parse_with_keys(_parser(), arguments)
    stop_texts = options.stop or []
    if "" in stop_texts:
        raise ConfigError("--stop: '' given, which every text begins with. Give a text that ends one, or leave it out")
    named = open_model(options.checkpoint, keys, options.adapter, options.weights)
    tokenizer, prompts = named.tokenizer, options.prompt or [""]
    stops = StopStrings(stop_texts, tokenizer.decode)

    with named.plan.layout.use():
        model = named.for_use()
        began = time.perf_counter()
        decoding = generation_config_of(options, named.stop_ids)
        ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
        texts = generate_tokens(Generator.of(model), ids, decoding, stops.until)
        seconds = time.perf_counter() - began
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    for prompt, new in zip(prompts, texts, strict=True):
        print(prompt + stops.before(new), end="\n---\n")
    count = sum(map(len, texts))
    rate = f"{count / seconds:.1f} tokens/s, compiling included"
    print(f"{count} tokens in {seconds:.1f} s ({rate}), from {named.place}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
