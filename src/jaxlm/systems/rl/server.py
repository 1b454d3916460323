"""Samples on an inference server: vLLM or SGLang, through the completions of their OpenAI-compatible interface.

Tokens go in and come out, so that nothing depends on how a server encodes text. Process 0 asks, and tells the others.
"""

import contextlib
import functools
import queue
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt, is_float32
from jaxlm.core.rules import Rules, excludes
from jaxlm.core.runtime import from_main, main_only
from jaxlm.core.stores import is_url
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.models.inference.sampling import Sampling
from jaxlm.reading.choices import choice
from jaxlm.systems.rl.json_server import JsonServer, RefusedError, ServerConfig
from jaxlm.systems.rl.samplers import Sample, Sampler, SamplerConfig, SamplerContext, SamplingRequest

T = TypeVar("T")

_KEY = "data.sampler"
_VLLM_RELOAD = "/collective_rpc"
_LARGEST_SEED = 2**31 - 1
_SAME_TOKENIZER = "Serve the model that trains, with its tokenizer"
_UNUSABLE = "the server's answer cannot be used"
_COMPLETIONS, _TOKENIZE = "/v1/completions", "/tokenize"
_TOKENIZE_S = 10.0
_ROUNDING = 0.01  # of a log-probability in bfloat16
_SAMPLE_TEXT = "The 17 naïve cafés, 3.14 — \t你好!\n    if x != 42: don't"  # that tokenizers split in different ways
# Servers take what a request leaves out from the model's generation_config.json.
_WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@choice(SamplerConfig, "server")
class ServerSamplerConfig(SamplerConfig):
    """An inference server samples the responses. Before it does, the weights are exported to a folder, which it loads.

    Attributes:
        server: where it is. vLLM must be started with VLLM_SERVER_DEV_MODE=1, which allows it to load weights.
        weights_folder: folder for the exported weights, under the same path on the server's machine. Only the newest
            weights stay in it.
        protocol: the server's requests to load weights: those of `vllm` or `sglang`.
        updates_per_export: number of updates after which the weights are exported again. With more than 1, responses come
            from older weights, and the objective needs the sampler's log-probabilities (`old_policy: rollout`).
        logprobs: vLLM's `--logprobs-mode`: `raw`, its default, needs `temperature: 1`; with `processed`, start it with
            `--logprobs-mode processed_logprobs`, which `top_k`, `top_p`, `min_p` and `repetition_penalty` need too. SGLang's
            are processed, but by the temperature and the penalty alone, so that it refuses the other three.
        model: the model's name on the server; null leaves it out.
        max_concurrent: number of requests at a time. Each asks for one response.
    """

    key_rules: ClassVar[Rules] = (
        excludes("protocol", when="logprobs", is_="raw", why="but SGLang's are processed: set logprobs: processed"),
    )

    server: ServerConfig
    weights_folder: str = ""
    protocol: Literal["vllm", "sglang"] = "vllm"
    updates_per_export: PositiveInt = 1
    logprobs: Literal["raw", "processed"] = "raw"
    model: str | None = None
    max_concurrent: PositiveInt = 64

    def check(self) -> None:
        self.server.check(f"{_KEY}.server")
        if not self.weights_folder or is_url(self.weights_folder):
            raise ConfigError(
                f"{_KEY}.weights_folder: '{self.weights_folder}' given, a folder expected that the server's machine has"
                " under the same path"
            )

    def check_opens(self, sampling: Sampling, *, dry: bool) -> None:
        self.check_sampling(sampling)
        if not dry:
            make_folder(self.folder)
        try:
            JsonServer(self.server).check_reachable(wait=not dry)
        except ConfigError as error:
            raise ConfigError(f"{_KEY}.server: {error}") from error

    def check_tokens(self, tokenizer: Tokenizer, *, dry: bool) -> None:
        once, soon = replace(self.server, num_retries=0), min(self.server.timeout_s, _TOKENIZE_S)
        named = {} if self.model is None else {"model": self.model}
        ours = tokenizer.encode(_SAMPLE_TEXT)
        try:
            ask = JsonServer(replace(once, timeout_s=soon)).post
            answer = ask(_TOKENIZE, {**named, "prompt": _SAMPLE_TEXT, "add_special_tokens": False})
        except ConfigError:
            answer = None  # servers need not have it
        theirs = answer.get("tokens") if isinstance(answer, dict) else None
        if isinstance(theirs, list) and not _mean_the_same(tokenizer, theirs, ours):
            raise ConfigError(
                f"{_KEY}: the server has another vocabulary: it encodes {_SAMPLE_TEXT[:13]!r}... as {_first_ids(theirs)}, and"
                f" data.tokenizer as {_first_ids(ours)}. {_SAME_TOKENIZER}"
            )
        last = tokenizer.vocab_size - 1
        body = {
            **named,
            **_request([*ours, last], max_tokens=1, sampling=Sampling(), seed=0, stop_ids=tokenizer.stop_ids),
        }
        try:
            answer = JsonServer(once if dry else self.server).post(_COMPLETIONS, body)
            # The run's templates and environment may add tokens at which it stops.
            _sample(answer, body | {"stop_token_ids": range(tokenizer.vocab_size)}, tokenizer.vocab_size)
        except RefusedError as error:
            raise ConfigError(
                f"{_KEY}: the server does not continue a prompt that ends with the last token of data.tokenizer, {last}:"
                f" {error}. {_SAME_TOKENIZER}"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"{_KEY}.server: {error}") from error
        except _AnswerError as error:
            raise ConfigError(f"{_KEY}: {_UNUSABLE}: {error}") from error

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises `ConfigError` if the server's log-probabilities are not those of the distribution that it samples from."""
        changed = {**({} if sampling.temperature == 1 else {"temperature": sampling.temperature}), **sampling.changed}
        if self.logprobs == "raw" and changed:
            raise ConfigError(
                f"{_KEY}.logprobs: raw given with {_as_text(changed)}, but raw log-probabilities are those of the model at"
                " temperature 1. Start vLLM with --logprobs-mode processed_logprobs and set logprobs: processed"
            )
        filters = {name: value for name, value in sampling.changed.items() if name != "repetition_penalty"}
        if self.protocol == "sglang" and filters:
            raise ConfigError(
                f"{_KEY}.protocol: sglang given with {_as_text(filters)}, but SGLang's log-probabilities are those of all"
                f" tokens, and not of those that these keys leave. Remove data.{next(iter(filters))}, or use vLLM"
            )

    @property
    def folder(self) -> Path:
        """The folder that weights are exported to."""
        return Path(self.weights_folder).absolute()

    def open(self, context: SamplerContext) -> Sampler:
        return ServerSampler(self, context, JsonServer(self.server))


class ServerSampler(Sampler):
    """Asks a server. A response depends on the seed, the step, the turn and its row, not on the other requests."""

    def __init__(self, config: ServerSamplerConfig, context: SamplerContext, server: JsonServer):
        self._config, self._context, self._server = config, context, server
        self._folder = config.folder
        self._exported: int | None = None  # step of the weights that the server has

    def sample(self, model: Any, prompts: Sequence[Sequence[int]], request: SamplingRequest) -> list[Sample]:
        self._config.check_sampling(request.sampling)
        self._update(model, request.step)
        return [
            Sample(tuple(tokens), tuple(logps), tuple(mask), is_finished)
            for tokens, logps, mask, is_finished, *_ in from_main(lambda: self._ask(prompts, request))
        ]

    def close(self) -> None:
        return

    def _update(self, model: Any, step: int) -> None:
        """Gives the server the current weights, if those that it has are too old."""
        if self._exported is not None and 0 <= step - self._exported < self._config.updates_per_export:
            return
        folder = self._folder / f"weights-{step}"
        main_only(lambda: self._prepare(folder))
        self._context.export(model, folder)
        main_only(lambda: self._load(folder))
        self._exported = step

    def _prepare(self, folder: Path) -> None:
        """Makes room for the weights. A process that was killed may have left some."""
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(self._folder)

    def _load(self, folder: Path) -> None:
        """Has the server load the weights, and removes older ones."""
        answers = [self._post(path, body) for path, body in _reloads(self._config.protocol, str(folder))]
        if failed := [one for one in answers if isinstance(one, dict) and one.get("success") is False]:
            raise ConfigError(
                f"{_KEY}: the server did not load {folder}: {failed[0].get('message', failed[0])}. {_SAME_TOKENIZER}, and"
                " check that its machine has this folder"
            )
        for old in self._folder.glob("weights-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def _ask(self, prompts: Sequence[Sequence[int]], request: SamplingRequest) -> list[Sample]:
        # One request for each response: servers compute a prompt that they have in their prefix cache only once.
        calls = [
            functools.partial(self._one, prompt, row, request)
            for prompt, row in zip(prompts, request.rows, strict=True)
        ]
        return _at_the_same_time(calls, self._config.max_concurrent, self._context.progress)

    def _one(self, prompt: Sequence[int], row: int, request: SamplingRequest) -> Sample:
        body = {
            **({} if self._config.model is None else {"model": self._config.model}),
            **_request(
                list(map(int, prompt)),
                max_tokens=min(request.max_new_tokens, request.room or request.max_new_tokens),
                sampling=request.sampling,
                seed=seed_of(request, row),
                stop_ids=request.stop_ids,
            ),
        }
        answer = self._post(_COMPLETIONS, body)
        try:
            return _sample(answer, body, self._context.vocab_size)
        except _AnswerError as error:
            raise ConfigError(f"{_KEY}: {_UNUSABLE}: {error}") from error

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return self._server.post(path, body)
        except ConfigError as error:
            advice = "" if path != _VLLM_RELOAD else ". Start vLLM with VLLM_SERVER_DEV_MODE=1"
            raise ConfigError(f"{_KEY}: {error}{advice}") from error


def _as_text(options: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {value:g}" for name, value in options.items())


def _reloads(protocol: str, folder: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The requests that have a server load weights, and forget the keys and values of the old ones."""
    if protocol == "sglang":
        return [("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})]
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return [(_VLLM_RELOAD, reload), ("/reset_prefix_cache", {})]


def _request(
    prompt: list[int], *, max_tokens: int, sampling: Sampling, seed: int, stop_ids: Sequence[int]
) -> dict[str, Any]:
    """The body of a request for one response."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        **_WHOLE_DISTRIBUTION,
        **sampling.changed,
        "n": 1,
        "seed": seed,
        "stop_token_ids": list(stop_ids),
        "logprobs": 1,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _mean_the_same(tokenizer: Tokenizer, theirs: list[Any], ours: list[int]) -> bool:
    """Tells whether the server's tokens stand for the same text. It may split it otherwise: it only gets and sends ids."""
    if not all(type(one) is int and 0 <= one < tokenizer.vocab_size for one in theirs):
        return False
    return tokenizer.decode(theirs) == tokenizer.decode(ours)


def _first_ids(tokens: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, tokens[:8]))}{', ...' if len(tokens) > 8 else ''}]"


class _AnswerError(Exception):
    """An answer is not what was asked for."""


def seed_of(request: SamplingRequest, row: int) -> int:
    """The seed of a response."""
    entropy = (request.seed, request.step, request.turn, row)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) & _LARGEST_SEED


def _sample(answer: Any, body: Mapping[str, Any], vocab_size: int) -> Sample:
    """The only choice of an answer, checked against its request and the run's vocabulary."""
    try:
        (choice,) = answer["choices"]
        tokens, reason = choice["token_ids"], choice["finish_reason"]
        logps = choice["logprobs"]["token_logprobs"]
        is_complete = isinstance(tokens, list) and isinstance(logps, list)
    except (TypeError, KeyError, ValueError) as error:
        raise _AnswerError(
            f"one choice with token_ids, logprobs and finish_reason expected ({type(error).__name__}: {error}). Use a version"
            " of the server that supports return_token_ids"
        ) from error
    if not is_complete or len(tokens) != len(logps) or not 1 <= len(tokens) <= body["max_tokens"]:
        sizes = [len(one) if isinstance(one, list) else one for one in (tokens, logps)]
        raise _AnswerError(
            f"{sizes[0]} tokens with {sizes[1]} log-probabilities given, 1 to {body['max_tokens']} of both expected"
        )
    if not all(type(one) is int and one >= 0 for one in tokens):
        raise _AnswerError("token_ids has other values than tokens")
    if (largest := max(tokens)) >= vocab_size:
        raise _AnswerError(
            f"the token {largest} given, but data.tokenizer has {vocab_size:,} tokens. {_SAME_TOKENIZER}"
        )
    if not all(type(one) in (int, float) and is_float32(one) for one in logps):
        raise _AnswerError("a log-probability is null or not finite")
    if max(logps) > _ROUNDING:
        raise _AnswerError(f"the log-probability {max(logps):g} given, at most 0 expected")
    read = choice.get("prompt_token_ids")
    if read is not None and read != body["prompt"]:
        raise _AnswerError(
            f"it has read the prompt {str(read)[:40]}..., but {body['prompt'][:8]}... was sent. {_SAME_TOKENIZER}"
        )
    if reason not in ("stop", "length"):
        raise _AnswerError(f"finish_reason: {reason!r} given, stop or length expected")
    if reason == "stop" and tokens[-1] not in body["stop_token_ids"]:
        raise _AnswerError(
            f"it stopped at the token {tokens[-1]}, but only {body['stop_token_ids']} end a response. {_SAME_TOKENIZER}"
        )
    return Sample(tuple(tokens), tuple(map(float, logps)), (1,) * len(tokens), reason == "stop")


def make_folder(folder: Path) -> None:
    """Makes the folder for the weights. Raises `ConfigError` if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{_KEY}.weights_folder: {folder} cannot be written ({error.strerror}). Set another folder"
        ) from error


def _at_the_same_time(calls: Sequence[Callable[[], T]], most: int, progress: Callable[[], None]) -> list[T]:
    """The results of calls, at most `most` at a time. Raises the first error at once.

    The process need not wait for the threads when it ends: a request may be without an answer for long.

    Args:
        progress: called after each of them.
    """
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()
    for number in range(len(calls)):
        left.put(number)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not stop.is_set():
                number = left.get_nowait()
                try:
                    ended.put((number, calls[number](), None))
                except BaseException as error:  # raised again in the thread that waits for the calls
                    ended.put((number, None, error))

    for _ in range(min(most, len(calls))):
        threading.Thread(target=work, name="sampler", daemon=True).start()
    results: dict[int, Any] = {}
    try:
        while len(results) < len(calls):
            number, result, error = ended.get()
            if error is not None:
                raise error
            results[number] = result
            progress()
    finally:
        stop.set()
    return [results[number] for number in range(len(calls))]
