"""Translates caramba's manifests (`version: 2`) to jaxlm's configuration: data, checks, benchmarks, runs.

Source: caramba's training guide and manifest reference, and the fields of its configuration classes. Every key is translated,
or accepted with a note that says why it has no effect, or refused with what to do instead. Nothing is ignored silently.
"""

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxlm.compat.caramba.model import put_model, put_student
from jaxlm.compat.caramba.train import DEFAULT_BLOCK_SIZE, drop_start, put_sanity, put_train
from jaxlm.compat.section import TOKENS, Section, Translated, hub_name, put_text
from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import map_array
from jaxlm.reading.choices import choice
from jaxlm.reading.decode import config_error
from jaxlm.reading.foreign import ForeignConfig
from jaxlm.reading.targets import (
    ENTRYPOINTS,
    TARGETS,
    VARS,
    Resolved,
    Selection,
    entrypoint,
    overridden,
    substituted,
    unused,
    variables_of,
)
from jaxlm.reading.yaml import ConfigSource

_CACHES = {"fp16": "bfloat16", "bf16": "bfloat16", "fp32": "float32", "q8": "int8", "q8_0": "int8"}


def put_verify(verifies: Sequence[tuple[str, Section]], has_teacher: bool, out: Translated) -> None:
    """Writes the evaluations. Args: verifies: name of each phase that has one, with the section."""
    if not verifies:
        return
    out.put("evals.0.type", "loss", verifies[0][1], "type")
    for number, (phase, verify) in enumerate(verifies, start=1):
        kind = verify.choice("type", ("compare", "fidelity", "eval"))
        if kind is None:
            raise verify.error("type", "missing. Set it to compare, fidelity or eval")
        if not has_teacher:
            raise verify.error("type", f"'{kind}' compares with a teacher, but no run of the target has a teacher_ckpt")
        name = {"eval": "cases"}.get(kind, kind)
        keys: dict[str, Any] = {"type": name, "name": f"{name}_{phase}", "phases": [phase]}
        keys |= {"compare": _compare, "fidelity": _fidelity, "eval": _cases}[kind](verify)
        for key, value in keys.items():
            out.put(f"evals.{number}.{key}", value, verify, "type")
        verify.done()


def _given(section: Section, *keys: str) -> dict[str, Any]:
    return {key: value for key in keys if (value := section.take(key)) is not None}


def _compare(verify: Section) -> dict[str, Any]:
    keys = {"batches": verify.take("batches", 5)} | _given(verify, "fail_fast")
    for part in ("attention", "logits"):
        limits = verify.section(part)
        keys[part] = _given(limits, "max_mean_l1", "max_max_l1") or None
        limits.done()
    return keys


def _fidelity(verify: Section) -> dict[str, Any]:
    if verify.choice("split", ("auto", "train", "val"), "auto") == "train":
        raise verify.error("split", "'train' given, but evaluations read validation data. Set split: val")
    return {"batches": verify.take("batches", 5), **_given(verify, "max_delta_nll", "max_ppl_ratio", "fail_fast")}


def _cases(verify: Section) -> dict[str, Any]:
    verify.ignore("tokenizer", "the tokenizer is the run's")
    thresholds = verify.section("thresholds")
    limits = _given(thresholds, "min_student_accuracy", "max_accuracy_drop")
    thresholds.done()
    cases = []
    for case in verify.sections("cases"):
        cases.append(_given(case, "id", "prompt", "answer", "choices", "kind"))
        case.done()
    return {**_given(verify, "max_new_tokens", "fail_fast"), **limits, "cases": cases}


def put_benchmarks(benchmarks: Sequence[Section], dataset: Any, out: Translated) -> None:
    """Writes the tables. Args: dataset: path of the target's data."""
    number = 0
    for benchmark in benchmarks:
        name, repeats = benchmark.take("id"), benchmark.take("repeats", 1)
        models = benchmark.take("models", [])
        if not set(models) <= {"teacher", "student"}:
            raise benchmark.error("models", f"{models!r} given, a list of teacher and student expected")
        if models:
            benchmark.note("models", "`jaxlm tables` measures the run and its references")
        config = benchmark.section("config")
        kind = config.choice("type", ("perplexity", "latency", "memory"))
        if kind is None:
            raise config.error("type", "missing. Set it to perplexity, latency or memory")
        tables = {"perplexity": _perplexity, "latency": _latency, "memory": _memory}[kind](config, repeats, dataset)
        for index, keys in enumerate(tables):
            title = name if len(tables) == 1 else f"{name or kind}_{index}"
            for key, value in {"type": kind, **({"name": title} if title else {}), **keys}.items():
                out.put(f"tables.{number}.{key}", value, config, "type")
            number += 1
        config.done()
        benchmark.done()


def _perplexity(config: Section, repeats: int, dataset: Any) -> list[dict[str, Any]]:
    if (given := config.take("dataset", dataset)) != dataset:
        raise config.error(
            "dataset", f"{given!r} given, but tables are of the run's validation data ({dataset!r}). Remove it"
        )
    config.ignore("batch_size", "batches are those of the run's evaluation")
    lens = config.take("block_size")
    keys = {"batches": config.take("num_batches", 100), "repeats": repeats}
    return [{**({} if lens is None else {"seq_lens": [lens]}), **keys}]


def _latency(config: Section, repeats: int, _: Any) -> list[dict[str, Any]]:
    keys = {"prompt_tokens": config.take("prompt_lengths"), "new_tokens": config.take("generation_lengths")}
    keys |= {"warmup": config.take("warmup_runs"), "runs": config.take("timed_runs"), "repeats": repeats}
    if config.take("use_cache", True) is not True:
        raise config.error("use_cache", "false given, but generation always has a KV cache. Set it to true")
    kind = config.take("cache_kind")
    keys["cache_dtypes"] = None if kind is None else _caches(config, "cache_kind", [kind])
    return [{**_set(keys), "batch_size": size} for size in config.take("batch_sizes", [1])]


def _memory(config: Section, repeats: int, _: Any) -> list[dict[str, Any]]:
    del repeats  # of a number of bytes
    for key in ("measure_peak", "measure_kvcache"):
        config.ignore(key, "tables of memory have both")
    modes = config.take("quantization_modes")
    keys = {"contexts": config.take("sequence_lengths")}
    keys["cache_dtypes"] = None if modes is None else _caches(config, "quantization_modes", modes)
    return [{**_set(keys), "batch_size": size} for size in config.take("batch_sizes", [1])]


def _caches(config: Section, key: str, kinds: Sequence[Any]) -> list[str]:
    left_out = [kind for kind in kinds if kind not in _CACHES]
    known = list(dict.fromkeys(_CACHES[kind] for kind in kinds if kind in _CACHES))
    if left_out and not known:
        raise config.error(key, f"{left_out[0]!r} given: there is no such KV cache. Known: {', '.join(_CACHES)}")
    if left_out:
        config.note(key, f"{', '.join(map(str, left_out))} is left out: there is no such KV cache")
    return known


def _set(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


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


_VERSION = "version"
_PHASES = {
    "trainer.standard": ("standard",),
    "trainer.upcycle": ("blockwise", "global"),
    "trainer.train": ("standard", "blockwise", "global"),
}


@choice(ForeignConfig, "caramba")
class Caramba(ForeignConfig):
    """Manifests of caramba. jaxlm's own configurations have no version."""

    meaning = "a caramba manifest; those begin with `version: 2`"

    def recognizes(self, tree: Mapping[str, Any], own: Collection[str]) -> bool:
        return _VERSION in tree

    def check(self, source: ConfigSource) -> None:
        check_version(source)

    def translate(self, source: ConfigSource, selection: Selection) -> Resolved:
        return from_caramba(source, selection)


def check_version(source: ConfigSource) -> None:
    """Raises `ConfigError` for a part of a manifest that does not say that it is one."""
    tree = source.tree
    targets = tree.get(TARGETS)
    parts = {
        TARGETS: isinstance(targets, list) and any(isinstance(one, Mapping) for one in targets),
        "runs": isinstance(tree.get("runs"), list),
        "trainer": tree.get("trainer") in tuple(_PHASES),
        "train": isinstance(tree.get("train"), Mapping) and "phase" in tree["train"],
    }
    for key in (key for key, is_there in parts.items() if is_there):
        raise config_error(
            source,
            (key,),
            "as in caramba's manifests, but the file does not say that it is one. Add version: 2 at its top. `trainer` and"
            f" `runs` belong to an entry of the list `{TARGETS}`, and `train` to an entry of `runs`",
        )


def from_caramba(source: ConfigSource, selection: Selection) -> Resolved:
    """Translates one target of a manifest. Without a name, that is `entrypoints.default`, or the only target.

    Raises:
        ConfigError: the manifest is not valid, or asks for what jaxlm cannot do.
    """
    index, target = _target(source, selection)
    given = variables_of(source.tree, source)
    notes = [*unused(given, source.tree)]
    variables = overridden(given, selection.variables)
    tree = {key: value for key, value in source.tree.items() if key not in (VARS, ENTRYPOINTS, TARGETS)}
    tree = {key: substituted(source, (key,), variables) for key in tree}
    top = Section(source, (), tree, notes)
    if (version := top.take(_VERSION)) != 2:
        raise top.error(_VERSION, f"{version!r} given, 2 expected: jaxlm reads caramba's manifests of version 2")
    keys = substituted(source, (TARGETS, index), variables)
    out = Translated()
    _experiment(Section(source, (TARGETS, index), keys, notes), top, target, out)
    top.done()
    return Resolved(out.source(), target, tuple(notes), "caramba")


def _target(source: ConfigSource, selection: Selection) -> tuple[int, str]:
    targets = source.tree.get(TARGETS)
    if not isinstance(targets, list) or not all(isinstance(one, dict) for one in targets) or not targets:
        raise config_error(source, (TARGETS,), "a list of targets expected, each with type: experiment and a name")
    names = [str(one.get("name", f"target_{index}")) for index, one in enumerate(targets)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise config_error(source, (TARGETS, index, "name"), f"'{name}' is the name of two targets. Rename one")
    name = entrypoint(source, names, selection.target)
    if name is None and len(names) > 1:
        raise ConfigError(
            f"command line: --target: the manifest has several targets and no entrypoints.default. Add --target NAME, one of"
            f" {', '.join(names)}"
        )
    index = 0 if name is None else names.index(name)
    return index, names[index]


def _experiment(target: Section, top: Section, name: str, out: Translated) -> None:
    kind = target.take("type", "experiment")
    if kind != "experiment":
        raise target.error("type", f"{kind!r} given, which jaxlm cannot do: it runs targets of type experiment")
    target.take("name")
    title = top.take("name")
    if title is not None:
        out.put("trainer.id", re.sub(r"[^\w.-]+", "_", f"{title}-{name}"), top, "name")
    top.ignore("notes", "a comment of the YAML file says the same")
    target.ignore("description", "a comment of the YAML file says the same")
    target.choice("backend", ("torch", "jax"), "torch")
    target.choice("task", ("task.language_modeling",), "task.language_modeling")
    target.choice("objective", ("objective.next_token_ce",), "objective.next_token_ce")
    _runs(target, top, out)


def _runs(target: Section, top: Section, out: Translated) -> None:
    allowed = _PHASES[target.choice("trainer", _PHASES, "trainer.train")]
    runs = target.sections("runs")
    if not runs:
        raise target.error("runs", "missing. A target has a list of runs, each with a `train` section")
    trains = [run.section("train") for run in runs]
    phases = [train.choice("phase", allowed, allowed[0]) for train in trains]
    teachers = [train.take("teacher_ckpt") for train in trains]
    teacher = _teacher(trains, phases, teachers, out)
    defaults = top.section("defaults")
    dataset = _path_of(target)
    block_size = put_data(
        target.section("data"),
        defaults.section("data"),
        teacher,
        trains[0].peek("block_size") or DEFAULT_BLOCK_SIZE,
        out,
    )
    put_logging(defaults.section("logging"), out)
    put_runtime(defaults.section("runtime"), out)
    defaults.done()
    _put_system(target, trains[0], teacher, out)
    verifies = []
    for number, (run, train, phase) in enumerate(zip(runs, trains, phases, strict=True)):
        place = f"phases.{number}." if teacher is not None or len(runs) > 1 else ""
        phase_name = _run(run, place, phase, out)
        if teacher is None or number:
            drop_start(train, "no effect without a teacher" if teacher is None else "no effect after the first run")
        else:
            put_sanity(train, out)
        put_train(train, place, phase, block_size, out)
        if "verify" in run:
            verifies.append((phase_name, run.section("verify")))
        run.done()
    put_verify(verifies, teacher is not None, out)
    put_benchmarks(target.sections("benchmarks"), dataset, out)
    target.done()


def _run(run: Section, place: str, phase: str, out: Translated) -> str:
    """Writes the keys of a run beside `train`, and returns the name of its phase. Args: place: as of `put_train`."""
    name = re.sub(r"\W", "_", str(run.take("id", phase)))
    if place:
        out.put(f"{place}name", name, run, "id")
    length = f"{place}num_train_steps" if place else "trainer.num_train_steps"
    run.choice("mode", ("train",), "train")
    run.ignore("exp", f"the phase is called {name}")
    steps = run.take("steps")
    if steps is None:
        run.note("steps", f"missing: trainer.num_train_steps applies. Set it, or --{length}")
    else:
        out.put(length, steps, run, "steps")
    if (seed := run.take("seed")) is not None:
        out.put("trainer.seed", seed, run, "seed")
    expected = run.section("expected")
    if (wanted := expected.take("phase", phase)) != phase:
        raise expected.error("phase", f"{wanted!r} expected, but train.phase is {phase!r}")
    expected.done()
    return name


def _teacher(trains: list[Section], phases: list[str], teachers: list[Any], out: Translated) -> str | None:
    """Writes the teacher of a target that upcycles, from which the model starts; None for one that does not."""
    for train, phase, path in zip(trains, phases, teachers, strict=True):
        if phase == "standard" and path is not None:
            raise train.error(
                "teacher_ckpt",
                f"{path!r} given with phase: standard, which asks no teacher. To start from its weights, set"
                f" --initialize_from_hf {hub_name(str(path))}",
            )
    if all(phase == "standard" for phase in phases):
        return None
    given = [(train, str(path)) for train, path in zip(trains, teachers, strict=True) if path is not None]
    if not given:
        raise trains[0].error(
            "teacher_ckpt", f"missing, but a run has the phase {phases[0]}. Set it to hf://ORG/NAME or a folder"
        )
    for train, path in given:
        name = hub_name(path)
        out.put("initialize_from_hf", name, train, "teacher_ckpt")
        out.put("use_hf_model_config", True, train, "teacher_ckpt")
        out.put("refs.teacher.type", "hf", train, "teacher_ckpt")
        out.put("refs.teacher.path", name, train, "teacher_ckpt")
    return hub_name(given[0][1])


def _put_system(target: Section, first: Section, teacher: str | None, out: Translated) -> None:
    if "system" not in target:
        if teacher is not None:
            raise target.error("system", "missing. It says which attention the student has: mode, sem_dim and geo_dim")
        target.note("system", "missing: the model is that of the section model, or its default")
        target.take("system")
    elif teacher is None:
        put_model(target.section("system"), out)
    else:
        put_student(target.section("system"), first, "phases.0", teacher, out)


def _path_of(target: Section) -> Any:
    """The path of the target's data, which benchmarks name again."""
    data = target.peek("data")
    config = data.get("config") if isinstance(data, Mapping) else None
    return config.get("path") if isinstance(config, Mapping) else None
