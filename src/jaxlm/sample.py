"""A checkpoint to text.

python -m jaxlm.sample --checkpoint checkpoints/quickstart --prompt "def " --prompt "import "
"""

import argparse
import sys
import time
from collections.abc import Sequence

import jax

from jaxlm.commands import run_command
from jaxlm.evals.samples import prompt_ids
from jaxlm.models.decode import generate
from jaxlm.trained import checkpoint_parser, open_trained, parse_with_keys


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return run_command(lambda: _sample(sys.argv[1:] if arguments is None else arguments))


def _parser() -> argparse.ArgumentParser:
    parser = checkpoint_parser(
        "jaxlm.sample",
        "Continues prompts with a trained model. Keys of the saved configuration may follow: --trainer.mp f32.",
    )
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="for each prompt (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top_k", type=int, default=None, help="choose among so many of the likeliest tokens")
    parser.add_argument(
        "--top_p", type=float, default=None, help="choose among the likeliest that make up this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    return parser


def _sample(arguments: Sequence[str]) -> int:
    options, keys = parse_with_keys(_parser(), arguments)
    trained = open_trained(options.checkpoint, keys)
    plan, tokenizer = trained.plan, trained.tokenizer
    with plan.layout.use():
        model = jax.jit(plan.precision.to_compute)(trained.load_model(options.weights))
        prompts = options.prompt or [""]
        began = time.perf_counter()
        texts = generate(
            model,
            [prompt_ids(tokenizer, prompt) for prompt in prompts],
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            eos_id=tokenizer.eos_id,
        )
        seconds = time.perf_counter() - began
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    for prompt, ids in zip(prompts, texts, strict=True):
        print(prompt + tokenizer.decode(ids), end="\n---\n")
    num_tokens = sum(map(len, texts))
    print(f"{num_tokens} tokens in {seconds:.1f} s, compiling included, from {trained.found.path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
