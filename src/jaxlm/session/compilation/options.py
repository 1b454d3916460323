"""What the training step is compiled with: the persistent cache, XLA options, offloading, block sizes.

XLA options are a table by platform, and block sizes follow from the processor's caches. `jaxlm bench --tune` finds better
ones on a machine.
"""

import builtins
import contextlib
import glob
import hashlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compilation_cache import compilation_cache

from jaxlm.core.devices import caches, processor
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import is_main_process, same_on_all_processes
from jaxlm.core.safe_io import SMALL, atomic_file, read_bytes
from jaxlm.core.stores import is_url
from jaxlm.core.tracing import BlockSizes
from jaxlm.models.attention.backends.blockwise import default_attention_block
from jaxlm.models.chunked_loss import default_chunk_tokens
from jaxlm.models.remat import FULL, RESIDUAL, RematOffload, RematPolicy, offloads, parse_remat, remat
from jaxlm.plan.plan import Plan
from jaxlm.reading.decode import choice_name, encode
from jaxlm.surgery.base import SurgeryConfig


def enable_compilation_cache(folder: str | None) -> None:
    """Makes JAX cache compiled programs and GPU autotuning results in `folder` for the next start; None disables it.

    An unusable folder only causes a warning. A program that cannot be read is deleted with a warning, because JAX would
    neither replace it nor stop failing on it.
    """
    if folder is not None and not is_url(folder):
        folder = str(Path(folder).absolute())  # JAX opens it later, perhaps from another working directory
    if folder != jax.config.values["jax_compilation_cache_dir"]:
        compilation_cache.reset_cache()  # otherwise JAX goes on with the folder of this process's first run
        jax.config.update("jax_compilation_cache_dir", folder)
    if folder is None:
        return
    handler = warnings.showwarning
    if not isinstance(handler, _CacheWarnings):
        handler = warnings.showwarning = _CacheWarnings(handler)
    handler.folder = Path(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # Not "all": XLA's kernel cache drops what TMA kernels need, so a program that reuses one ends with
    # CUDA_ERROR_ILLEGAL_INSTRUCTION on Hopper GPUs (openxla/xla#35951).
    jax.config.update("jax_persistent_cache_enable_xla_caches", "xla_gpu_per_fusion_autotune_cache_dir")
    jax.config.update("jax_raise_persistent_cache_errors", False)


class _CacheWarnings:
    """Rewrites JAX's warnings about its compilation cache for the user, and deletes programs that cannot be read."""

    _FAILED = re.compile(
        r"Error (?P<doing>reading|writing) persistent compilation cache entry for '(?P<name>[^']+)':"
        r" (?P<error>\w+)(?P<why>.*)"
    )

    def __init__(self, otherwise: Callable[..., None]):
        self._otherwise = otherwise
        self.folder = Path()

    def __call__(self, message, category, filename, lineno, file=None, line=None) -> None:
        failed = self._FAILED.match(str(message))
        if failed is None:
            self._otherwise(message, category, filename, lineno, file, line)
        elif is_main_process():  # only process 0 writes to the cache
            reading = failed["doing"] == "reading"
            is_os_error = issubclass(getattr(builtins, failed["error"], Exception), OSError)
            outcome = "The program is compiled without the cache. Check the folder, or choose another"
            if reading and not is_os_error and self._delete(failed["name"]):
                outcome = "The cached program was deleted and is compiled again"
            print(
                f"warning: trainer.compilation_cache_dir: cannot {'read' if reading else 'write'} {failed['name']} in"
                f" {self.folder} ({failed['error']}{failed['why'][:200]}). {outcome}",
                file=sys.stderr,
                flush=True,
            )

    def _delete(self, name: str) -> bool:
        """Deletes all cached programs of a name, since JAX does not say which one failed. False if one is left, or none."""
        programs = list(self.folder.glob(f"{glob.escape(name)}-*"))
        for path in programs:
            with contextlib.suppress(OSError):
                path.unlink()
        return bool(programs) and not any(path.exists() for path in programs)


# Before this version, XLA for GPUs copies what a loop has offloaded back in the order of the forward pass, and all gradients
# are wrong without an error (openxla/xla#46231, #46308). Shown in compiled programs of jaxlib 0.10.2; those of 0.11.1, 0.11.2
# and 0.12.0.1 have the reverse order.
_ORDER_FIXED_IN = (0, 11, 1)
_DISABLED = "xla_disable_hlo_passes"
_WRONG_PASS = "dynamic-slice-annotator"
_LAYERS, _ROWS, _WIDTH = 3, 64, 256
_TOLERANCE = 1e-3  # a wrong order is wrong in the first digit


def offload_options(plan: Plan) -> dict[str, str]:
    """The XLA options that keep old compilers from reading offloaded activations in the wrong order."""
    offloading = any(offloads(parse_remat(phase.model.gradient_checkpointing)) for phase in plan.phases)
    if plan.layout.platform != "gpu" or not offloading or jaxlib.version.__version_info__ >= _ORDER_FIXED_IN:
        return {}
    flags = (flag.lstrip("-").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    disabled = [passes for name, _, passes in flags if name == _DISABLED]
    return {_DISABLED: ",".join([*disabled, _WRONG_PASS])}


def check_offload(options: Mapping[str, Any]) -> None:
    """Compares the gradients of a few layers with and without offloading their inputs.

    Args:
        options: XLA options of the training step.

    Raises:
        ConfigError: they differ on this device.
    """
    if jax.default_backend() == "cpu":
        return  # has one memory, and stands in for a device that is not attached
    expected, offloaded = (_gradient(policy, options) for policy in (FULL, RematOffload((), (RESIDUAL,))))
    if not np.allclose(offloaded, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ConfigError(
            "model.gradient_checkpointing.offload: on this device, layers that offload have wrong gradients with jaxlib"
            f" {jaxlib.version.__version__} and XLA_FLAGS='{os.environ.get('XLA_FLAGS', '')}'. Remove what is in XLA_FLAGS,"
            " or use another version of jax, or set model.gradient_checkpointing: full"
        )


def _gradient(policy: RematPolicy, options: Mapping[str, Any]) -> np.ndarray:
    def layer(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, RESIDUAL)
        return x + jnp.sin(scale * x), None

    def loss(scales: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(remat(policy, layer, scan=True), x, scales)[0] ** 2)

    scales = jnp.linspace(0.1, 1.0, _LAYERS * _WIDTH, dtype=jnp.float32).reshape(_LAYERS, _WIDTH)
    x = jnp.linspace(-1.0, 1.0, _ROWS * _WIDTH, dtype=jnp.float32).reshape(_ROWS, _WIDTH)
    compiled = jax.jit(jax.grad(loss)).lower(scales, x).compile(dict(options))
    return np.asarray(compiled(scales, x)) / _ROWS


Options = dict[str, bool | int | str]

# They are passed to each compilation instead of the environment, so that they apply only to the training step and need not
# be set before JAX starts. XLA_FLAGS take precedence. Every option here needs a reason; docs/howto/watch.md has the same
# table.
TABLE: Mapping[str, Options] = {
    "cpu": {},  # which options are faster depends on the processor: see CANDIDATES
    # Overlaps collectives with computation; off by default in XLA. No effect on one device. It runs only one of several
    # collectives beside a kernel, so what a ring passes on (keys, values, their gradients) becomes one. XLA stops at 30 MB.
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_collective_permute_combine_threshold_bytes": 1 << 40,
    },
    "tpu": {},
}

CANDIDATES: Mapping[str, Sequence[Options]] = {
    "cpu": (
        {"xla_cpu_prefer_vector_width": 512},  # AVX-512 everywhere; XLA prefers 256 bits
        {"xla_cpu_use_xnnpack": True},  # libraries for matrix products other than Eigen
        {"xla_cpu_experimental_xnn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"},
        {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"},
        {"xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"},
        {"xla_cpu_enable_concurrency_optimized_scheduler": False},
    )
}
"""XLA options that `jaxlm bench --tune` measures on a platform, beside the table. A jaxlib that lacks an option skips it."""

_FACTORS = (0.25, 0.5, 2, 4)  # sizes that are measured, relative to those by cache
_PARTS, _PART_NUMBERS = "head_gradient_parts", (1, 2)
_BLOCK_SIZES = tuple(2**power for power in range(4, 14))

# As JSON, in which 1 is not true.
_KNOWN = {json.dumps(item) for candidates in CANDIDATES.values() for options in candidates for item in options.items()}
_FILE = "tuned_options.json"
_DEFAULT = "XLA's own"


@dataclass(frozen=True)
class StepOptions:
    """Holds what the training step is traced and compiled with.

    Attributes:
        xla: options of the compilation.
        sizes: block sizes, all None on platforms that have nothing to tune.
    """

    xla: Options
    sizes: BlockSizes

    @staticmethod
    def of(platform: str, options: Options) -> "StepOptions":
        """Separates options by name. Block sizes that are not among them are those by cache."""
        sizes = _sizes_by_cache(platform)
        block_sizes = {name: value for name, value in options.items() if name in asdict(sizes)}
        xla = {name: value for name, value in options.items() if name not in block_sizes}
        return StepOptions(xla, replace(sizes, **block_sizes))

    @property
    def texts(self) -> tuple[str, str]:
        """The XLA options and the block sizes."""
        return as_text(self.xla), as_text({name: size for name, size in asdict(self.sizes).items() if size is not None})


@dataclass(frozen=True)
class TunedOptions:
    """Options that were the fastest for a step on a machine.

    Attributes:
        processor: see `hardware.processor`.
        jaxlib: version of the compiler.
        step: see `step_key`.
        options: XLA options besides the table, and fields of `BlockSizes`; empty if nothing was faster.
        ratio: how many times as fast the step is with them: low end, median, high end of a 95 % interval.
        measured_unix_s: when.
    """

    processor: str
    jaxlib: str
    step: str
    options: Options
    ratio: tuple[float, float, float]
    measured_unix_s: float

    def __str__(self) -> str:
        low, median, high = self.ratio
        day = time.strftime("%Y-%m-%d", time.gmtime(self.measured_unix_s))
        if not self.options:
            return f"{_DEFAULT}, the fastest when tuned on {day}"
        faster = f"{median:.2f} times as fast as without ({low:.2f} to {high:.2f})"
        return f"{as_text(self.options)}: {faster}, tuned on {day}"


def as_text(options: Options) -> str:
    """The options as they are written in XLA_FLAGS, without dashes. Block sizes look the same."""
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def compiler_options(platform: str, surgeries: Sequence[SurgeryConfig] = ()) -> Options:
    """The XLA options of the table for a platform and of surgeries, without those that XLA_FLAGS sets."""
    options = dict(TABLE[platform])
    for surgery in surgeries:
        options |= surgery.wants.compiler_options.get(platform, {})
    return _not_set_by_user(options)


def _sizes_by_cache(platform: str) -> BlockSizes:
    """Without candidates, every run has the same sizes, and they need not be stated."""
    if platform not in CANDIDATES:
        return BlockSizes()
    return BlockSizes(default_chunk_tokens(platform), default_attention_block(platform))


def size_candidates(platform: str) -> list[Options]:
    """Block sizes that `jaxlm bench --tune` measures: a quarter to four times of those by cache, and numbers of parts."""
    sizes = {name: size for name, size in asdict(_sizes_by_cache(platform)).items() if size is not None}
    scaled: Iterator[Options] = ({name: int(size * by)} for name, size in sizes.items() for by in _FACTORS)
    valid = [options for options in scaled if all(size in _BLOCK_SIZES for size in options.values())]
    return [*valid, *({_PARTS: parts} for parts in _PART_NUMBERS if sizes)]


def step_options(plan: Plan) -> StepOptions:
    """The options of the table, of the surgeries, and the tuned ones, without those that XLA_FLAGS sets, and what offloading
    needs. All processes must call this.

    Processes whose tuned options differ use those of the table, and block sizes by cache.
    """
    tuned = tuned_options(plan)
    options = tuned.options if tuned is not None else {}
    if not same_on_all_processes(json.dumps(options, sort_keys=True)):
        options = {}
    platform = plan.layout.platform
    surgeries = [surgery for phase in plan.state_builder.phases for surgery in phase.surgeries]
    chosen = compiler_options(platform, surgeries) | _not_set_by_user(options) | offload_options(plan)
    return StepOptions.of(platform, chosen)


def tuned_options(plan: Plan) -> TunedOptions | None:
    """Returns what was tuned for the step of this plan, on this processor with this compiler; None if nothing was."""
    if plan.layout.platform not in CANDIDATES:
        return None
    machine = (processor(), jaxlib.version.__version__, step_key(plan))
    matches = [t for t in _read(_path(plan)) if (t.processor, t.jaxlib, t.step) == machine]
    return matches[-1] if matches else None


def describe_options(plan: Plan) -> str | None:
    """Says which options the step is compiled with, and why; None if the platform has nothing to tune and no option is set.
    All processes must call this.
    """
    used = step_options(plan)
    if plan.layout.platform not in CANDIDATES:
        return as_text(used.xla) or None
    tuned = tuned_options(plan)
    if tuned is not None and tuned.options.items() <= (used.xla | asdict(used.sizes)).items():
        return str(tuned)
    if tuned is not None:
        why_not = "those tuned here are not used: XLA_FLAGS or another process has others"
        return f"{as_text(used.xla) or _DEFAULT}; {why_not}"
    if others := [t for t in _read(_path(plan)) if t.step == step_key(plan) and t.options]:
        was = f"{others[-1].processor}, jaxlib {others[-1].jaxlib}"
        now = f"{processor()}, jaxlib {jaxlib.version.__version__}"
        why_not = f"those tuned on another machine ({was}) are not used on {now}. Tune again: jaxlm bench --tune"
        return f"{_DEFAULT}; {why_not}"
    return f"{_DEFAULT}; `jaxlm bench --tune` looks for faster ones on this machine"


def describe_sizes(plan: Plan) -> str | None:
    """The block sizes of the step, and where they come from; None if the platform has nothing to tune. All processes must
    call this.
    """
    if plan.layout.platform not in CANDIDATES:
        return None
    used = step_options(plan)
    if used.sizes != _sizes_by_cache(plan.layout.platform):
        return f"{used.texts[1]}, tuned"
    return f"{used.texts[1]}, for these caches: {caches()}"


def step_key(plan: Plan) -> str:
    """Identifies what the speed of the first phase's step depends on: model, batch, mesh and precision."""
    facts = {
        "model": encode(plan.phases[0].model),
        "batch": plan.batches.of(plan.phases[0]).largest.shape,
        "mesh": str(plan.mesh),
        "precision": str(plan.precision),
        "optimizer": choice_name(type(plan.phases[0].optimizer)),
        **({"context": encode(plan.layout.context)} if plan.context else {}),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def keep(plan: Plan, tuned: TunedOptions) -> Path | None:
    """Writes tuned options beside the compiled programs, in place of earlier ones for the same step and machine.

    Returns:
        The file, or None if there is no local compilation cache.
    """
    path = _path(plan)
    if path is None:
        return None
    same = (tuned.processor, tuned.jaxlib, tuned.step)
    others = [old for old in _read(path) if (old.processor, old.jaxlib, old.step) != same]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as unfinished:
        unfinished.write_text(json.dumps([asdict(entry) for entry in (*others, tuned)], indent=1))
    return path


def _path(plan: Plan) -> Path | None:
    folder = plan.config.trainer.compilation_cache_dir
    return None if folder is None or is_url(folder) else Path(folder) / _FILE


def _read(path: Path | None) -> list[TunedOptions]:
    """The readable entries of a file. What is damaged costs a run only speed."""
    if path is None:
        return []
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_bytes(path, SMALL))
        return list(_entries(content if isinstance(content, list) else []))
    return []


def _entries(content: Sequence[Any]) -> Iterator[TunedOptions]:
    for entry in content:
        with contextlib.suppress(AttributeError, TypeError, ValueError, KeyError, OverflowError, OSError):
            low, median, high = (float(number) for number in entry["ratio"])
            tuned = TunedOptions(**{**entry, "ratio": (low, median, high)})
            time.gmtime(tuned.measured_unix_s)  # a time that cannot be shown is damage, too
            if all(_is_known(*item) for item in tuned.options.items()):
                yield tuned


def _is_known(name: str, value: Any) -> bool:
    if name in asdict(BlockSizes()):
        allowed = _PART_NUMBERS if name == _PARTS else _BLOCK_SIZES
        return type(value) is int and value in allowed  # True is an int
    return json.dumps((name, value)) in _KNOWN


def _not_set_by_user(options: Options) -> Options:
    flags = {flag.lstrip("-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if name not in flags}
