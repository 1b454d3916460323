"""The `data` section of a target and the `defaults` of a manifest."""

import contextlib
from typing import Any

from jaxlm.core.safe_io import map_array
from jaxlm.interop.section import Section
from jaxlm.interop.text_path import TOKENS, put_text
from jaxlm.interop.translated import Translated

_TOKENIZERS = {"llama": "meta-llama/Llama-3.2-1B", "tiktoken": "gpt2", "gpt2": "gpt2"}
"""Names of tokenizers in caramba -> repository on the Hub."""


def put_data(data: Section, defaults: Section, teacher: str | None, usual: Any, out: Translated) -> Any:
    """Writes where tokens come from.

    Args:
        usual: the sequence length if the section does not say one.

    Returns:
        The sequence length in the section; None if it does not say one.
    """
    data.choice("ref", ("dataset.tokens",), "dataset.tokens")
    config = data.section("config")
    path, block_size = config.take("path"), config.take("block_size")
    config.done()
    data.done()
    if path is not None:
        put_text(str(path), config, "path", out)
    tokenizer = _tokenizer(defaults)
    if teacher is not None:
        if tokenizer is not None:
            defaults.note("tokenizer", f"the tokenizer is that of the teacher, {teacher}")
        out.put("data.tokenizer", teacher, defaults, "tokenizer")
    elif tokenizer is not None:
        out.put("data.tokenizer", _TOKENIZERS.get(tokenizer, tokenizer), defaults, "tokenizer")
    _held_out(defaults, path, usual if block_size is None else block_size, out)
    defaults.done()
    return block_size


def _tokenizer(defaults: Section) -> str | None:
    if not isinstance(value := defaults.take("tokenizer"), dict):
        return value
    section = defaults.inside("tokenizer", value)
    name = section.take("type")
    section.done()
    return name


def _held_out(defaults: Section, path: str | None, block_size: Any, out: Translated) -> None:
    """Writes how many sequences are held out: a number, which follows from the file's size."""
    fraction = defaults.number("val_frac", 0.0)
    if not fraction:
        return
    if not 0 < fraction < 1:
        raise defaults.error("val_frac", f"{fraction} given, at least 0 and below 1 expected")
    num_tokens = None
    if path is not None and path.endswith(TOKENS):
        with contextlib.suppress(OSError, ValueError):
            num_tokens = map_array(path).size
    if num_tokens is None or not isinstance(block_size, int):
        defaults.note(
            "val_frac",
            f"nothing is held out, because the number of sequences is not known here. Set data.num_validation_sequences to"
            f" {fraction} of them, or data.validation_urls",
        )
        return
    out.put("data.num_validation_sequences", max(1, int(num_tokens // block_size * fraction)), defaults, "val_frac")


def put_logging(logging: Section, out: Translated) -> None:
    """Writes where metrics go."""
    logging.ignore("instrument", "the console shows a line per step, and metrics.jsonl has all numbers")
    used = logging.choice("wandb", (True, False), False)
    keys = {name: logging.take(f"wandb_{name}") for name in ("project", "entity", "mode")}
    if used:
        out.put("trainer.tracker", {"type": "wandb", **{k: v for k, v in keys.items() if v}}, logging, "wandb")
    batches = logging.take("eval_iters")
    if batches is not None:
        out.put("trainer.max_eval_batches", batches, logging, "eval_iters")
    logging.done()


def put_runtime(runtime: Section, out: Translated) -> None:
    """Writes when checkpoints are saved."""
    every = runtime.take("save_every")
    if every is not None:
        out.put("trainer.checkpointer.keep", [{"every": every}], runtime, "save_every")
    runtime.done()
