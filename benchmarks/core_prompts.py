"""Compares the prompts of CORE with nanochat's: texts, token ids, and the tokens that are scored. No model, no network.

    git clone https://github.com/karpathy/nanochat
    python benchmarks/core_prompts.py --nanochat nanochat --bundle eval_bundle --tokenizer tokenizer --limit 500

nanochat's scripts/base_eval.py reads the bundle, chooses questions and examples, renders, and tokenizes with tiktoken, up to
the place where it would ask its model. The tokenizer is a folder with `tokenizer.json`: one that jaxlm has trained with
nanochat's pattern, or that of GPT-2. Needs the extra `torch`, tiktoken and jinja2. Ends with 1 if anything differs.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.systems.nanochat.core_bundle import CORE_TASKS, CoreTask, read_bundle
from jaxlm.systems.nanochat.core_eval import prompts, scored_tokens

_GPT2_BOS, _NANOCHAT_BOS = "<|endoftext|>", "<|bos|>"
# As tiktoken's gpt2 splits texts.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_RENDERERS = ("render_prompts_mc", "render_prompts_schema", "render_prompts_lm")
_SPLITTERS = ("batch_sequences_mc", "batch_sequences_schema", "batch_sequences_lm")
_COUNTS = ("questions", "prompts", "tokens", "texts differ", "token ids differ", "scored tokens differ", "refused")


class AskedError(Exception):
    """nanochat would now ask its model."""


class Comparison:
    """Watches nanochat's functions, and compares each question with jaxlm's."""

    def __init__(self, tokenizer: Any, tasks: Iterator[CoreTask]):
        self._tokenizer, self._tasks = tokenizer, tasks
        self._begin = np.array([tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id], np.int32)
        self._seen: dict[str, Any] = {}
        self._task: CoreTask | None = None
        self.counts: dict[str, Counter] = {}
        self.longest = 0

    def watch(self, module: ModuleType) -> None:
        """Replaces functions of nanochat/core_eval.py."""

        def recorded(name: str, key: str) -> None:
            function = getattr(module, name)

            def call(*arguments: Any, **options: Any) -> Any:
                self._seen[key] = function(*arguments, **options)
                return self._seen[key]

            setattr(module, name, call)

        def stop(*_: Any) -> None:
            raise AskedError

        for name in _RENDERERS:
            recorded(name, "texts")
        for name in _SPLITTERS:
            recorded(name, "spans")
        module.stack_sequences = stop
        evaluate_example = module.evaluate_example

        def compared(number: int, *arguments: Any) -> bool:
            self._seen.clear()
            try:
                evaluate_example(number, *arguments)
            except AskedError:
                pass
            except AssertionError:  # an answer that changes the last token before it
                self._seen["spans"] = None
            return self._compare(number)

        module.evaluate_example = compared

    def _compare(self, number: int) -> bool:
        if number == 0:
            self._task = next(self._tasks)
            self.counts[self._task.name] = Counter()
        assert self._task is not None
        task, counts = self._task, self.counts[self._task.name]
        texts = prompts(task, number)
        rows = [np.concatenate([self._begin, row]) for row in self._tokenizer.encode_arrays(texts)]
        counts.update({"questions": 1, "prompts": len(rows), "tokens": sum(map(len, rows))})
        self.longest = max(self.longest, *map(len, rows))
        found = {"texts differ": texts != self._seen["texts"]}
        if self._seen["spans"] is None:
            found["refused"] = True
        else:
            theirs, starts, ends = self._seen["spans"]
            own = rows[-len(theirs) :]  # of a language modeling question, only the text with the answer
            found["token ids differ"] = [row.tolist() for row in own] != [list(row) for row in theirs]
            # Where no token comes before the scored ones, nothing is scored.
            found["scored tokens differ"] = [(a.tolist(), b.tolist()) for a, b in scored_tokens(task.kind, rows)] != [
                (row[:start], row[start:end]) if start else (row, [])
                for row, start, end in zip(theirs, starts, ends, strict=True)
            ]
        counts.update({name: int(differs) for name, differs in found.items()})
        return not any(found.values())


def encoding(folder: Path) -> tuple[Any, str]:
    """tiktoken's encoding of a byte-level tokenizer.json, and its BOS token."""
    import tiktoken
    from nanochat.tokenizer import SPLIT_PATTERN  # from the checkout

    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    byte_of = {character: byte for byte, character in enumerate(_characters_of_bytes())}
    vocabulary = spec["model"]["vocab"].items()
    ranks = {bytes(byte_of[c] for c in token): number for token, number in vocabulary if token not in special}
    bos = next((token for token in (_NANOCHAT_BOS, _GPT2_BOS) if token in special), None)
    if bos is None:
        raise SystemExit(f"--tokenizer: {folder} has neither {_NANOCHAT_BOS} nor {_GPT2_BOS}")
    pattern = _GPT2_PATTERN if bos == _GPT2_BOS else SPLIT_PATTERN
    made = tiktoken.Encoding(folder.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return made, bos


def _characters_of_bytes() -> list[str]:
    """The character for each byte in the vocabularies of byte-level tokenizers: itself, or the next one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def main() -> int:
    """Compares all tasks, and returns the exit code."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as base:
        (Path(base) / "eval_bundle").symlink_to(options.bundle.resolve())
        os.environ["NANOCHAT_BASE_DIR"] = base
        sys.path.insert(0, str(options.nanochat.resolve()))
        for name in ("rustbpe", "wandb"):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        import torch
        from nanochat import core_eval
        from nanochat.tokenizer import RustBPETokenizer
        from scripts.base_eval import evaluate_core

        tasks = iter(read_bundle(str(options.bundle), CORE_TASKS, options.limit or None))
        comparison = Comparison(load_tokenizer(str(options.tokenizer)), tasks)
        comparison.watch(core_eval)
        tokenizer = RustBPETokenizer(*encoding(options.tokenizer))
        evaluate_core(None, tokenizer, torch.device("cpu"), max_per_task=options.limit or -1)
    total = sum(comparison.counts.values(), Counter())
    for task, counts in [*comparison.counts.items(), ("all", total)]:
        print(f"{task:34}" + "  ".join(f"{name} {counts[name]:,}" for name in _COUNTS))
    print(json.dumps({"longest": int(comparison.longest), **{name: int(total[name]) for name in _COUNTS}}))
    return int(any(total[name] for name in _COUNTS if name.endswith("differ")))


def parse_arguments() -> argparse.Namespace:
    """The command line. Wrong values end the process with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, required=True, help="checkout of nanochat")
    parser.add_argument("--bundle", type=Path, required=True, help="the folder of CORE's tasks")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--limit", type=int, default=500, help="questions of each task; 0 for all (default 500)")
    options = parser.parse_args()
    for name, file in (("nanochat", "nanochat/core_eval.py"), ("bundle", "core.yaml"), ("tokenizer", "tokenizer.json")):
        folder = getattr(options, name)
        if not (folder / file).is_file():
            parser.error(f"--{name}: {folder} given, but it has no {file}")
    if options.limit < 0:
        parser.error(f"--limit: {options.limit} given, 0 or more expected")
    for name in ("torch", "tiktoken", "jinja2"):
        if importlib.util.find_spec(name) is None:
            parser.error(f"{name} is not installed. Run pip install 'jaxlm[torch]' tiktoken jinja2")
    return options


if __name__ == "__main__":
    sys.exit(main())
