"""Runs the recipe post_training/end_to_end.yaml, and measures what each of its phases achieves.

    python benchmarks/end_to_end.py --folder runs/end_to_end [--questions 200] [--key value ...]

The run's exports, one from the end of each phase, answer the same held-out questions, greedily and with the calculator. An
answer is right if its last number is the result. Keys of the configuration may follow (`--trainer.seed 1`). Start the same
command again after an interruption. Writes `end_to_end.json` into the folder; the last line printed is JSON.
"""

import argparse
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from training_runs import start

from jaxlm.commands.chat import turn_ends
from jaxlm.data.sources.tasks.arithmetic import answered, problem_maker
from jaxlm.data.sources.tasks.base import VALIDATION, user
from jaxlm.data.tokenizer.chat_template import ChatTemplate
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.unstacked import Generator
from jaxlm.observe.trackers import read_jsonl
from jaxlm.plan.load_config import read_config
from jaxlm.session.generation_options import tool_calls_of
from jaxlm.session.load_model import open_model

RECIPE = "jaxlm:post_training/end_to_end.yaml"
_MAX_NEW_TOKENS, _STORIES, _ROWS = 64, 0.4, 50


def main() -> None:
    """Trains, asks and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the run and the results")
    parser.add_argument("--questions", type=int, default=200, help="held-out questions (default 200)")
    options, keys = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seconds = start(options.folder, "train", "--config_path", RECIPE, *keys)
    problems = questions(options.questions)
    right, ends, first = {}, {}, 0
    for phase in read_config(RECIPE).phases:
        first += phase.num_train_steps or 0
        ends[phase.name] = first
    for name, end in ends.items():
        share = fraction_right(options.folder / "exports" / "end_to_end" / f"step-{end}", problems)
        error = math.sqrt(share * (1 - share) / len(problems))
        right[name] = [share, error]
        print(f"{name}: {share:.3f} of {len(problems)} answers are right (standard error {error:.3f})", file=sys.stderr)
    found = {"right": right, "reward": rewards(options.folder), "last": last_evaluations(options.folder)}
    found |= {"seconds": seconds, "keys": keys}
    (options.folder / "end_to_end.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


def questions(number: int) -> list[tuple[str, str]]:
    """Questions that no phase trains on, with their results."""
    found: list[tuple[str, str]] = []
    chooser = random.Random("end to end")
    while len(found) < number:
        problem = problem_maker(chooser, _STORIES)(chooser, VALIDATION)
        if problem is not None:
            found.append((problem.question, answered(problem)[1].removesuffix(".0")))
    return found


def fraction_right(export: Path, problems: Sequence[tuple[str, str]]) -> float:
    """The fraction of questions that an exported model answers with the right number."""
    loaded = open_model(str(export), {})
    tokenizer = loaded.tokenizer
    template = ChatTemplate.load(None, tokenizer, "the export's chat template")
    calls = tool_calls_of(argparse.Namespace(tool="calculator"), tokenizer)
    answer_text = tokenizer.decode if calls is None else calls.show
    prompts = [template.prompt([user(question)], "a question") for question, _ in problems]
    ids = [encoded[0].tolist() for encoded in tokenizer.encode_with_offsets(prompts)]
    stop_ids = (*tokenizer.stop_ids, *turn_ends(template, tokenizer))
    config = GenerationConfig(_MAX_NEW_TOKENS, 0.0, stop_ids=stop_ids)
    right = 0
    with loaded.plan.layout.use():
        generator = Generator.of(loaded.for_inference(None))
        for at in range(0, len(ids), _ROWS):
            answers = generate_tokens(generator, ids[at : at + _ROWS], config, None, calls)
            for answer, (_, result) in zip(answers, problems[at : at + _ROWS], strict=True):
                # As `<<12 * 7=84>>84`: without marks, the call and its output would run into the answer.
                text = answer_text(answer)
                numbers = re.findall(r"-?\d+(?:\.\d+)?", text.rpartition(">>")[2])
                right += bool(numbers) and numbers[-1] == result
    return right / len(problems)


def rewards(folder: Path) -> dict[str, float]:
    """The mean reward of the first and of the last ten rollouts."""
    found = [record["train/reward"] for record in records(folder) if "train/reward" in record]
    return {"first": statistics.fmean(found[:10]), "last": statistics.fmean(found[-10:])}


def last_evaluations(folder: Path) -> dict[str, float]:
    """The last value of each metric that the evaluations have logged."""
    last: dict[str, float] = {}
    for record in records(folder):
        last |= {name: value for name, value in record.items() if name.startswith("eval/")}
    return last


def records(folder: Path) -> list[dict[str, float]]:
    """What the run has logged, step after step. Of repeated steps, the last."""
    return read_jsonl(folder / "logs" / "end_to_end" / "metrics.jsonl")


if __name__ == "__main__":
    main()
