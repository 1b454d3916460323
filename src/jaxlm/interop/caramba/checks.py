"""`verify` of a run, as evaluations, and `benchmarks` of a target, as tables."""

from collections.abc import Sequence
from typing import Any

from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

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
