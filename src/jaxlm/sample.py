"""A checkpoint to text.

python -m jaxlm.sample --checkpoint checkpoints/quickstart --prompt "def " --prompt "import "
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxlm.commands import run_command
from jaxlm.config import read_config
from jaxlm.core.errors import ConfigError
from jaxlm.data.tokenizer import load_tokenizer
from jaxlm.engine.checkpoint import find_checkpoints, read_cursor
from jaxlm.engine.integrity import DamagedError, verify
from jaxlm.engine.restore import Found, restore
from jaxlm.evals.samples import prompt_ids
from jaxlm.models.decode import generate
from jaxlm.plan import make_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    return run_command(lambda: _sample(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxlm.sample", description="Continues prompts with a trained model."
    )
    parser.add_argument(
        "--checkpoint", required=True, help="a checkpoint, or a run's folder of them (the newest is used)"
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


def _sample(options: argparse.Namespace) -> int:
    found = find_checkpoint(Path(options.checkpoint))
    tokenizer = load_tokenizer(str(found.path / "run" / "tokenizer"))
    plan = make_plan(read_config(found.path / "run" / "config.yaml"), "sample", tokenizer.vocab_size)
    abstract = plan.recipe.abstract_state(plan.phases[found.cursor.phase]).model
    with plan.layout.use():
        model = jax.jit(plan.precision.to_compute)(restore(found, abstract, plan.layout, prefix="model"))
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
    for prompt, ids in zip(prompts, texts, strict=True):
        print(prompt + tokenizer.decode(ids), end="\n---\n")
    num_tokens = sum(map(len, texts))
    print(f"{num_tokens} tokens in {seconds:.1f} s, compiling included, from {found.path}", file=sys.stderr)
    return 0


def find_checkpoint(path: Path) -> Found:
    """The checkpoint that a path names: itself, or the newest in a run's folder. Its files are checked.

    Raises:
        ConfigError: there is none, or its files are not what was saved.
    """
    candidates = [path] if (path / "run" / "cursor.json").is_file() else find_checkpoints(path)
    if not candidates:
        near = sorted(str(p.parent) for p in path.parent.glob("*/step-*")) if path.parent.is_dir() else []
        there = f" There are: {', '.join(dict.fromkeys(near))}" if near else ""
        raise ConfigError(f"--checkpoint {path}: no checkpoint there (step-N, or a folder of them).{there}")
    newest = candidates[-1]
    try:
        verify(newest)
    except DamagedError as damage:
        raise ConfigError(f"--checkpoint {newest}: damaged: {damage}. Name another one") from damage
    return Found(newest, read_cursor(newest))


if __name__ == "__main__":
    sys.exit(main())
