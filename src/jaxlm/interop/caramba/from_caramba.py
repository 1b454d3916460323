"""Translates caramba's manifests (`version: 2`) to jaxlm's configuration.

Source: caramba's training guide and manifest reference, and the fields of its configuration classes. Every key is translated,
or accepted with a note that says why it has no effect, or refused with what to do instead. Nothing is ignored silently.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.interop.caramba.checks import put_benchmarks, put_verify
from jaxlm.interop.caramba.data import put_data, put_logging, put_runtime
from jaxlm.interop.caramba.model import put_model, put_student
from jaxlm.interop.caramba.train_keys import DEFAULT_BLOCK_SIZE, drop_start, put_sanity, put_train
from jaxlm.interop.section import Section
from jaxlm.interop.text_path import hub_name
from jaxlm.interop.translated import Translated
from jaxlm.reading.decode import config_error
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

_VERSION = "version"
_PHASES = {
    "trainer.standard": ("standard",),
    "trainer.upcycle": ("blockwise", "global"),
    "trainer.train": ("standard", "blockwise", "global"),
}


def is_caramba(tree: Mapping[str, Any]) -> bool:
    """Whether a file is a manifest: jaxlm's own configurations have no version."""
    return _VERSION in tree


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
