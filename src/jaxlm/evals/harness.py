"""Tasks of EleutherAI's lm-evaluation-harness, on the model as it lies on the mesh.

Source: github.com/EleutherAI/lm-evaluation-harness, its interface for models (`docs/model_guide.md`); texts become tokens
as its own backend `hf` makes them, so that the numbers are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.evals.base import Eval, EvalConfig, EvalContext
from jaxlm.evals.scoring import score
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.stop_strings import StopStrings
from jaxlm.models.inference.unstacked import Generator

_USUAL_NEW_TOKENS = 256  # where a task does not say; as in the backend `hf`
_NAME = "tasks: lm-evaluation-harness"
# Mark of the harness on a task -> why it is not asked here.
_NOT_FOR_US = {"UNSAFE_CODE": "runs what the model writes", "MULTIMODAL": "shows what is no text"}


@EvalConfig.register_subclass("harness")
@dataclass(frozen=True)
class HarnessEvalConfig(EvalConfig):
    """Tasks of lm-evaluation-harness (`pip install 'jaxlm[eval]'`), logged as `eval/<task>/<metric>`.

    Attributes:
        tasks: names of tasks or groups, or paths of .yaml files.
        task_folder: a folder with tasks of one's own, beside those that the harness brings.
        num_fewshot: solved examples before each question; null takes what the task says.
        limit: so many documents of each task; null takes all.
        batch_size: texts that are read at once.
    """

    tasks: list[str] = field(default_factory=list)
    task_folder: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 16

    def open(self, ctx: EvalContext) -> Eval:
        """Raises `ConfigError`: see `open_tasks`."""
        return HarnessEval(open_tasks(self, ctx.seq_len), ctx)


class HarnessEval(Eval):
    """Runs the tasks."""

    def __init__(self, tasks: "OpenTasks", ctx: EvalContext):
        self._tasks, self._tokenizer = tasks, ctx.tokenizer
        self._cast = jax.jit(ctx.precision.to_compute)

    def run(self, model: LanguageModel) -> dict[str, float]:
        """Every number of every task; standard errors are left out."""
        found = self._tasks.run(self._cast(model), self._tokenizer)
        return {
            f"{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in found.items()
            for metric, value in metrics.items()
            if isinstance(value, int | float) and "stderr" not in metric and metric not in ("sample_len", "alias")
        }


@dataclass(frozen=True)
class OpenTasks:
    """Tasks that are there, with their documents, and that a model can answer.

    Attributes:
        evaluate: the harness' function that asks them.
        manager: the harness' index of tasks, which takes seconds to make.
    """

    config: HarnessEvalConfig
    evaluate: Callable[..., Any]
    manager: Any

    def run(self, model: LanguageModel, tokenizer: Any) -> dict[str, dict[str, Any]]:
        """Task -> metric -> value, as the harness names them (`acc,none`). Call it inside `layout.use()`.

        Args:
            tokenizer: `jaxlm.data.tokenizer.tokenizer.Tokenizer`.
        """
        results = self.evaluate(
            model=_backend(model, tokenizer, self.config.batch_size),
            tasks=list(self.config.tasks),
            num_fewshot=self.config.num_fewshot,
            limit=self.config.limit,
            task_manager=self.manager,
            log_samples=False,
            bootstrap_iters=0,
        )
        return results["results"]


def open_tasks(config: HarnessEvalConfig, seq_len: int) -> OpenTasks:
    """The tasks of a configuration, for a model that reads `seq_len` tokens. Fetches their documents.

    Raises:
        ConfigError: there are none, the harness is not installed, does not know one or cannot load it, or a model like this
            cannot answer one.
    """
    if not config.tasks:
        raise ConfigError(f"{_NAME} needs at least one of tasks. Name some, as [arc_easy, lambada_openai]")
    for name, least in (("limit", 1), ("batch_size", 1), ("num_fewshot", 0)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{_NAME}: {name}: {value} given, {least} or more expected")
    evaluate, manager_type = _harness()
    manager = manager_type(include_path=config.task_folder)
    unknown = [task for task in config.tasks if not (task in manager.all_tasks or _is_task_file(task))]
    if unknown:
        where = f", nor are they in {config.task_folder}" if config.task_folder else ". Is `task_folder` missing?"
        raise ConfigError(f"{_NAME} knows none of the name {', '.join(unknown)}{where}")
    try:
        loaded = manager.load(list(config.tasks))["tasks"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{_NAME} cannot load them: {type(error).__name__}: {error}") from error
    for name, task in loaded.items():
        _check_can_answer(name, task, seq_len)
    return OpenTasks(config, evaluate, manager)


def _is_task_file(name: str) -> bool:
    return name.endswith(".yaml") and Path(name).expanduser().is_file()


def _check_can_answer(name: str, task: Any, seq_len: int) -> None:
    for mark, why in _NOT_FOR_US.items():
        if getattr(task, mark, False):
            raise ConfigError(f"tasks: {name} {why}. Leave it out")
    if task.get_config("output_type") == "generate_until":
        _Asked.of(task.get_config("generation_kwargs") or {}, seq_len, name)


def _harness() -> tuple[Any, Any]:
    try:
        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports] - the extra `eval`
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"lm-evaluation-harness cannot be imported ({error}): pip install 'jaxlm[eval]'") from error
    return simple_evaluate, TaskManager


def _backend(model: LanguageModel, tokenizer: Any, batch_size: int) -> Any:
    """The model, as the harness asks models. Its class extends one of the harness, which is imported only here."""
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

    return type("Backend", (_Answers, TemplateLM), {})(model, tokenizer, batch_size)


class _Answers:
    """Log-likelihoods and greedy text, batched by length: the methods that the harness' `TemplateLM` leaves open."""

    def __init__(self, model: LanguageModel, tokenizer: Any, batch_size: int):
        super().__init__()
        self._model, self._tokenizer, self._batch_size = model, tokenizer, batch_size

    @property
    def eot_token_id(self) -> int:
        """What ends a document, or begins one where nothing ends it."""
        found = self._tokenizer.bos_id if self._tokenizer.eos_id is None else self._tokenizer.eos_id
        return 0 if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """For caches of requests: other tokens have another name."""
        return self._tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """As the tokenizer's file says; without what it puts around texts that begin with BOS already."""
        bos = self._tokenizer.template_names.get("bos_token")
        begins = add_special_tokens is None and bos is not None and string.startswith(bos)
        return self._tokenizer.encode_like_transformers(
            string, add_special_tokens=add_special_tokens is not False and not begins
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return [(one.log_likelihood, one.is_greedy) for one in score(self._model, pairs, self._batch_size)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Each text's log-likelihood; windows that follow each other cover what is longer than the model reads."""
        windows = [(number, window) for number, request in enumerate(requests) for window in self._windows(request)]
        sums = [0.0] * len(requests)
        scored = score(self._model, [window for _, window in windows], self._batch_size)
        for (number, _), one in zip(windows, scored, strict=True):
            sums[number] += one.log_likelihood
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each context's continuation, up to the first of the texts that end it."""
        alike: dict[str, list[int]] = {}
        for number in sorted(range(len(requests)), key=lambda i: -len(requests[i].args[0])):
            alike.setdefault(repr(requests[number].args[1]), []).append(number)
        texts, writer = [""] * len(requests), Generator.of(self._model)
        for numbers in alike.values():
            first = requests[numbers[0]]
            asked = _Asked.of(first.args[1], self._model.Pos.size, first.task_name)
            for start in range(0, len(numbers), self._batch_size):
                some = numbers[start : start + self._batch_size]
                found = self._continued(writer, [requests[i].args[0] for i in some], asked)
                for number, text in zip(some, found, strict=True):
                    texts[number] = text
        return texts

    def _windows(self, request: Any) -> Iterator[tuple[list[int], list[int]]]:
        from lm_eval import utils  # pyright: ignore[reportMissingImports]

        windows = utils.get_rolling_token_windows(
            token_list=self.tok_encode(request.args[0]),
            prefix_token=self.prefix_token_id,
            max_seq_len=self._model.Pos.size,
            context_len=1,
        )
        return map(utils.make_disjoint_window, windows)

    def _continued(self, writer: Generator, contexts: Sequence[str], asked: "_Asked") -> list[str]:
        stops = StopStrings(asked.stops, self._tokenizer.decode)
        stop_ids = () if self._tokenizer.eos_id is None else (self._tokenizer.eos_id,)
        room = self._model.Pos.size - asked.max_new_tokens
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        decoding = GenerationConfig(
            asked.max_new_tokens, asked.temperature, asked.top_k, asked.top_p, stop_ids=stop_ids
        )
        return [stops.before(ids) for ids in generate_tokens(writer, prompts, decoding, stops.until)]


@dataclass(frozen=True)
class _Asked:
    """What a task asks of generated text."""

    stops: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None

    @staticmethod
    def of(options: dict[str, Any], seq_len: int, task: str) -> "_Asked":
        until = options.get("until") or []
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        new = next((options[name] for name in names if options.get(name) is not None), _USUAL_NEW_TOKENS)
        if new >= seq_len:
            raise ConfigError(f"tasks: {task} asks for {new} new tokens; the model reads {seq_len} in all")
        draws = options.get("do_sample") is not False
        return _Asked(
            stops=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
            max_new_tokens=int(new),
            temperature=float(options.get("temperature") or 0.0) if draws else 0.0,
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
        )
