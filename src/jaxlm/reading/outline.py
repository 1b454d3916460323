"""The keys of all sections, read from the source code: a misspelled key is answered without jax, whose import takes seconds.

A section may have the keys of its class and of all that extend it, so what is refused here has no `type` that could take it.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxlm.core.errors import nearest_spelling
from jaxlm.reading.choices import sources
from jaxlm.reading.yaml import KeyPath

ROOT = "RunConfig"
_CLASS = re.compile(r"^class (\w+)(?:\[.*?\])?(?:\((.*?)\))?:\n((?:(?: .*)?\n)*)", re.M)
_FIELD = re.compile(r"^    ([a-z]\w*): (?!ClassVar)(.*)$", re.M)
_BY_OTHERS = {
    "initialize_from_hf": "model_name_or_path base_model model_name pretrained_model_name_or_path",
    "trainer.num_train_steps": "max_steps num_iterations max_iters train_steps",
    "trainer.train_batch_size": "total_batch_size global_batch_size batch_size",
    "trainer.per_device_parallelism": "per_device_train_batch_size micro_batch_size device_batch_size"
    " gradient_accumulation_steps grad_accum_steps",
    "trainer.per_device_eval_parallelism": "per_device_eval_batch_size eval_batch_size",
    "trainer.steps_per_eval": "eval_steps eval_every eval_interval evals_per_epoch",
    "trainer.checkpointer.base_path": "output_dir out_dir save_dir",
    "trainer.checkpointer.keep": "save_steps save_every saves_per_epoch save_total_limit",
    "trainer.log_dir": "logging_dir",
    "trainer.load_checkpoint_path": "resume_from_checkpoint",
    "trainer.tracker": "report_to wandb_project use_wandb",
    "trainer.mp": "bf16 fp16 dtype torch_dtype",
    "trainer.id": "run run_name",
    "epoch": "num_epochs num_train_epochs epochs",
    "optimizer.learning_rate": "lr",
    "optimizer.lr_schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optimizer.warmup": "warmup_steps warmup_ratio warmup_iters",
    "optimizer.max_grad_norm": "grad_clip gradient_clip_val clip_grad_norm",
    "model.seq_len": "sequence_len max_seq_len max_seq_length max_length block_size context_length",
    "data.train_urls": "datasets dataset_name dataset train_file data_files",
    "phases.N.surgery": "use_peft lora_r lora_alpha lora_target_modules load_in_4bit",
}
BY_OTHERS = {name: key for key, names in _BY_OTHERS.items() for name in names.split()}
"""Name in TRL, Axolotl, nanochat, nanoGPT or Levanter -> the key that comes closest."""


@functools.cache
def _sources() -> tuple[dict[str, tuple[set[str], dict[str, str]]], set[str]]:
    """Class -> its bases, and its fields with their annotations; and texts, among them all keys that are no fields."""
    classes, translated = {}, {"type"}
    for module, text in sources().items():
        if ".levanter." in module:
            translated.update(key for quoted in re.findall(r'"([\w.]+)"', text) for key in quoted.split("."))
        for head, bases, body in _CLASS.findall(text):  # classes of one name count as one
            of_name = classes.setdefault(head, (set(), {}))
            of_name[0].update(re.findall(r"\w+", bases))
            of_name[1].update(_FIELD.findall(body))
    return classes, translated


@functools.cache
def _fields(name: str) -> dict[str, str]:
    """The fields of a class, of the classes that extend it, and of the bases of all of them."""
    classes, family, more = _sources()[0], {name}, {name} - {ROOT}
    while more := {other for other, (bases, _) in classes.items() if bases & more} - family:
        family |= more
    typed = {} if len(family) == 1 else {"type": "str"}
    while more := {base for one in family for base in classes[one][0] if base in classes} - family:
        family |= more
    ordered = [name, *(one for one in classes if one in family - {name})]
    return {field: kind for one in ordered for field, kind in classes[one][1].items()} | typed


def _kinds(annotation: str) -> set[str]:
    """The classes of the sections that a field may have."""
    return _sources()[0].keys() & set(re.findall(r"\w+", annotation.partition(" = ")[0]))


def unknown_keys(tree: Mapping[str, Any], kind: str = ROOT, path: KeyPath = ()) -> Iterator[tuple[KeyPath, list[str]]]:
    """Yields the keys that no section at their place can have, each with those that it can have."""
    fields = _fields(kind)
    for key, value in tree.items():
        if key not in fields:
            if key not in _sources()[1]:
                yield (*path, key), list(fields)
            continue
        kinds = _kinds(fields[key])
        if len(kinds) != 1 or re.search(r"Any|Mapping|dict\[.*\|", fields[key]):
            continue  # what is inside depends on the value
        if isinstance(value, dict) and "dict[" not in fields[key]:
            sections: Any = [((), value)]
        else:
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            sections = [((name,), section) for name, section in items]
        for name, section in sections:
            if isinstance(section, dict) and ":" not in str(section.get("type")):  # not a class of a user
                yield from unknown_keys(section, next(iter(kinds)), (*path, key, *name))


@functools.cache
def places() -> dict[str, str]:
    """Name of a key -> the shortest path to it."""
    found: dict[str, str] = {}
    seen, level = {ROOT}, [("", ROOT)]
    while level:
        below = []
        for path, kind in level:
            for key, annotation in _fields(kind).items():
                if key != "type":
                    found.setdefault(key, f"{path}{key}")
                suffix = ".N" if "list[" in annotation else ".NAME" if "dict[" in annotation else ""
                below += [(f"{path}{key}{suffix}.", inner) for inner in sorted(_kinds(annotation) - seen)]
                seen |= _kinds(annotation)
        level = below
    return found


def meant(path: KeyPath, allowed: Collection[str], *, is_run: bool) -> str | None:
    """Guesses what a key means that its section does not have: a misspelled key, or one of another section or program.

    Args:
        allowed: the keys of the section.
        is_run: the path begins at the top level of a run, so that other sections are known.
    """
    key, dotted = str(path[-1]), ".".join(map(str, path))
    elsewhere = {**places(), **BY_OTHERS} if is_run else {}
    if key in BY_OTHERS and elsewhere.get(key, dotted) != dotted:
        return elsewhere[key].removeprefix(dotted.removesuffix(key))
    words = sorted(key.split("_"))
    near = next((name for name in allowed if sorted(name.split("_")) == words), None) or nearest_spelling(
        key, allowed, 0.7
    )
    if near or elsewhere.get(key, dotted) != dotted:
        return near or elsewhere[key]
    far = nearest_spelling(key, elsewhere, 0.85)
    return nearest_spelling(key, allowed, 0.5) or (far and elsewhere[far])
