"""Runs tasks of EleutherAI's lm-evaluation-harness on the model, sharded as it is on the mesh.

Source: the model interface of github.com/EleutherAI/lm-evaluation-harness (`docs/model_guide.md`). Texts are tokenized as
the harness's `hf` backend does, so the results match it.
"""

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveInt
from jaxlm.core.install import install_command
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalScope
from jaxlm.evals.batches import BatchedModel
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import GenerationConfig
from jaxlm.models.inference.sampling import StopStrings
from jaxlm.reading.choices import choice

_DEFAULT_NEW_TOKENS = 256  # if the task does not set a limit; the same as in the `hf` backend
_NAME = "tasks: lm-evaluation-harness"
# Attribute with which the harness marks a task -> why it is not supported.
_UNSUPPORTED = {"UNSAFE_CODE": "executes code that the model writes", "MULTIMODAL": "contains inputs other than text"}


@choice(EvalConfig, "harness")
class HarnessEvalConfig(EvalConfig):
    """Tasks of lm-evaluation-harness (the extra `eval`), logged as `eval/<task>/<metric>`.

    Attributes:
        tasks: task names, group names or paths of task .yaml files.
        task_folder: folder with your own task definitions, in addition to the harness's built-in tasks; null means none.
        num_fewshot: number of few-shot examples per prompt; null uses each task's default.
        limit: maximum number of documents per task; null uses all of them.
        batch_size: number of sequences per batch.
    """

    scope: ClassVar[EvalScope] = EvalScope(next_tokens=True)

    tasks: list[str] = field(default_factory=list)
    task_folder: str | None = None
    num_fewshot: NonNegativeInt | None = None
    limit: PositiveInt | None = None
    batch_size: PositiveInt = 16

    def check(self) -> None:
        if not self.tasks:
            raise ConfigError(f"{_NAME} needs at least one task. Set tasks, for example [arc_easy, lambada_openai]")
        if find_spec("lm_eval") is None:
            _harness()  # raises

    def open(self, ctx: EvalContext) -> Eval:
        """Raises `ConfigError` if a task cannot be loaded or run (see `open_tasks`)."""
        return HarnessEval(open_tasks(self, ctx.seq_len), ctx)


class HarnessEval(Eval):
    """Runs the tasks as an evaluation during training."""

    def __init__(self, tasks: "OpenTasks", ctx: EvalContext):
        self._tasks, self._ctx = tasks, ctx

    def run(self, model: LanguageModel) -> dict[str, float]:
        """All metrics of all tasks, without standard errors."""
        results = self._tasks.run(self._ctx.cast(model), self._ctx.tokenizer, progress=self._ctx.progress)
        return {
            f"{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in results.items()
            for metric, value in metrics.items()
            if isinstance(value, int | float) and "stderr" not in metric and metric not in ("sample_len", "alias")
        }


@dataclass(frozen=True)
class OpenTasks:
    """Tasks that were loaded with their documents and checked.

    Attributes:
        evaluate: the harness's evaluation function.
        manager: the harness's index of tasks, which takes seconds to build.
    """

    config: HarnessEvalConfig
    evaluate: Callable[..., Any]
    manager: Any

    def run(
        self,
        model: LanguageModel,
        tokenizer: Any,
        *,
        bootstrap_iters: int = 0,
        progress: Callable[[], None] = lambda: None,
    ) -> dict[str, dict[str, Any]]:
        """Task -> metric -> value, with the harness's metric names (`acc,none`). Call it inside `layout.use()`.

        Args:
            bootstrap_iters: resamples for standard errors (`acc_stderr,none`) that have no closed form; 0 computes no
                standard errors.
            progress: called after each batch.
        """
        # The harness would fork a process for each core, which may deadlock after jax has started its threads.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        results = self.evaluate(
            model=_backend(BatchedModel(model, self.config.batch_size, progress), tokenizer),
            tasks=list(self.config.tasks),
            num_fewshot=self.config.num_fewshot,
            limit=self.config.limit,
            task_manager=self.manager,
            log_samples=False,
            bootstrap_iters=bootstrap_iters,
        )
        return results["results"]


def open_tasks(config: HarnessEvalConfig, seq_len: int) -> OpenTasks:
    """Loads the tasks of a configuration for a model with a maximum sequence length of `seq_len`. Downloads their documents.

    Raises:
        ConfigError: the harness is not installed, it does not know a task or cannot load it, or the model cannot run it.
    """
    evaluate, manager_type = _harness()
    manager = manager_type(include_path=config.task_folder)
    is_file = lambda name: name.endswith(".yaml") and Path(os.path.expanduser(name)).is_file()  # noqa: E731
    unknown = [task for task in config.tasks if not (task in manager.all_tasks or is_file(task))]
    if unknown:
        # As the harness writes names: ARC-Easy is arc_easy.
        written = [task.lower().replace("-", "_") for task in unknown]
        near = [name for task in written for name in difflib.get_close_matches(task, manager.all_tasks, n=1)]
        meant = f" Did you mean {', '.join(near)}?" if near else ""
        advice = f" They are not in {config.task_folder} either" if config.task_folder else " Do you need task_folder?"
        raise ConfigError(f"{_NAME} has no tasks named {', '.join(unknown)}.{meant}{advice}")
    try:
        loaded = manager.load(list(config.tasks))["tasks"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{_NAME} cannot load the tasks: {type(error).__name__}: {error}") from error
    for name, task in loaded.items():
        for attribute, reason in _UNSUPPORTED.items():
            if getattr(task, attribute, False):
                raise ConfigError(f"tasks: {name} is not supported: it {reason}. Remove it")
        if task.get_config("output_type") == "generate_until":
            _GenerationRequest.of(task.get_config("generation_kwargs") or {}, seq_len, name)
    return OpenTasks(config, evaluate, manager)


def _harness() -> tuple[Any, Any]:
    try:
        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports] - the extra `eval`
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"cannot import lm-evaluation-harness ({error}). Run: {install_command('eval')}") from error
    return simple_evaluate, TaskManager


def _backend(model: BatchedModel, tokenizer: Any) -> Any:
    """The model behind the harness's model interface. The base class is imported here, because the harness is optional."""
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

    return type("Backend", (_BackendMethods, TemplateLM), {})(model, tokenizer)


class _BackendMethods:
    """Implements the abstract methods of the harness's `TemplateLM`: log-likelihoods and generation, batched by length."""

    def __init__(self, model: BatchedModel, tokenizer: Any):
        super().__init__()
        self._batched, self._tokenizer, self._seq_len = model, tokenizer, model.model.Pos.size

    @property
    def eot_token_id(self) -> int:
        """The EOS token, else the BOS token, else 0."""
        token_id = self._tokenizer.bos_id if self._tokenizer.eos_id is None else self._tokenizer.eos_id
        return 0 if token_id is None else token_id

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without context."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's caches of requests."""
        return self._tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes as the tokenizer's file says, but adds no special tokens if the text already starts with BOS."""
        bos = self._tokenizer.template_names.get("bos_token")
        starts_with_bos = add_special_tokens is None and bos is not None and string.startswith(bos)
        add = add_special_tokens is not False and not starts_with_bos
        return self._tokenizer.encode_like_transformers(string, add_special_tokens=add)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return [(scored.log_likelihood, scored.is_greedy) for scored in self._batched.score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text. Texts longer than the model's sequence length are split into disjoint windows."""
        windows = [(i, window) for i, request in enumerate(requests) for window in self._windows(request)]
        sums = [0.0] * len(requests)
        for (i, _), scored in zip(windows, self._batched.score([window for _, window in windows]), strict=True):
            sums[i] += scored.log_likelihood
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to the first stop string."""
        indices_by_options: dict[str, list[int]] = {}
        for i in sorted(range(len(requests)), key=lambda i: -len(requests[i].args[0])):
            indices_by_options.setdefault(repr(requests[i].args[1]), []).append(i)
        texts = [""] * len(requests)
        for indices in indices_by_options.values():
            first = requests[indices[0]]
            request = _GenerationRequest.of(first.args[1], self._seq_len, first.task_name)
            continuations = self._generate([requests[i].args[0] for i in indices], request)
            for i, text in zip(indices, continuations, strict=True):
                texts[i] = text
        return texts

    def _windows(self, request: Any) -> Iterator[tuple[list[int], list[int]]]:
        from lm_eval import utils  # pyright: ignore[reportMissingImports]

        windows = utils.get_rolling_token_windows(
            token_list=self.tok_encode(request.args[0]),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._seq_len,
            context_len=1,
        )
        return map(utils.make_disjoint_window, windows)

    def _generate(self, contexts: Sequence[str], request: "_GenerationRequest") -> list[str]:
        stops = StopStrings.of_text(request.stops, self._tokenizer.decode)
        max_prompt_tokens = self._seq_len - request.generation.max_new_tokens
        prompts = [self.tok_encode(context)[-max_prompt_tokens:] for context in contexts]
        config = replace(request.generation, stop_ids=self._tokenizer.stop_ids)
        return [stops.before(ids) for ids in self._batched.generate(prompts, config, stops.until)]


@dataclass(frozen=True)
class _GenerationRequest:
    """Says how a task wants text to be generated."""

    stops: tuple[str, ...]
    generation: GenerationConfig

    @staticmethod
    def of(options: dict[str, Any], seq_len: int, task: str) -> "_GenerationRequest":
        until = options.get("until") or []
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        max_new_tokens = next((options[name] for name in names if options.get(name) is not None), _DEFAULT_NEW_TOKENS)
        if max_new_tokens >= seq_len:
            raise ConfigError(
                f"tasks: {task} generates up to {max_new_tokens} tokens, but the model's maximum sequence length is"
                f" {seq_len}. Remove the task, or use a model with longer sequences"
            )
        samples = options.get("do_sample") is not False
        generation = GenerationConfig(
            max_new_tokens=int(max_new_tokens),
            temperature=float(options.get("temperature") or 0.0) if samples else 0.0,
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
            min_p=options.get("min_p"),
            repetition_penalty=options.get("repetition_penalty") or 1.0,
        )
        return _GenerationRequest(
            tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop), generation
        )
