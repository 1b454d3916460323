"""Generates text samples from the model during training."""

import contextlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Seed,
)
from jaxlm.evals.base import Eval, EvalConfig, EvalContext, EvalMetrics
from jaxlm.evals.batches import check_fits, prompt_ids
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.denoise import DenoisingConfig, denoised
from jaxlm.models.inference.generate import CacheDtype, GenerationConfig
from jaxlm.models.inference.sampling import check_temperature
from jaxlm.models.inference.tools.calls import Tool, ToolCalls
from jaxlm.reading.choices import choice


@dataclass(frozen=True)
class SamplingKeys:
    """How evaluations generate tokens.

    Attributes:
        temperature: sampling temperature; 0 decodes greedily.
        top_k: sample only from the `top_k` most likely tokens; null samples from all.
        top_p: sample only from the most likely tokens whose probabilities add up to `top_p`; null samples from all.
        min_p: sample only from tokens with at least this fraction of the most likely token's probability; null samples from
            all.
        repetition_penalty: makes tokens that the text has so far less likely: it divides their logits, or multiplies negative
            ones; 1 changes nothing.
        seed: random seed; the same model and seed generate the same text.
        cache_dtype: dtype of keys and values in the cache: float32, bfloat16 or int8, which needs the least memory. Null uses
            that of the activations.
    """

    temperature: NonNegativeFloat = 0.0
    top_k: PositiveInt | None = None
    top_p: PositiveFraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: PositiveFloat = 1.0
    seed: Seed = 0
    cache_dtype: CacheDtype | None = None

    def __post_init__(self):
        check_temperature(self.temperature)


@choice(EvalConfig, "samples")
class SamplesEvalConfig(SamplingKeys, EvalConfig):
    """Generates completions of a few prompts, prints them, and logs them to `samples.jsonl` and the trackers.

    Attributes:
        prompts: prompts to complete.
        max_new_tokens: maximum number of new tokens per prompt; generation stops earlier at the end-of-sequence token.
        tool: answers the model's calls, as in `jaxlm chat`, such as `{type: calculator}`; null answers none. The tokenizer
            must have the tokens of calls. Outputs count as new tokens.
        denoising: how a masked-diffusion model fills in the new tokens, such as `{num_steps: 16, block_length: 32}`; null for
            one token in each pass.
    """

    metrics: ClassVar[EvalMetrics] = EvalMetrics(())

    prompts: list[str] = field(default_factory=lambda: [""])
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 0.8
    tool: Tool | None = None
    denoising: DenoisingConfig | None = None

    def check(self) -> None:
        if not self.prompts:
            raise ConfigError(
                "evals: type samples: prompts: an empty list given. Give a prompt, such as '', or remove it"
            )

    def check_opens(self, tokenizer: Callable[[], Any], seq_len: int, *, dry: bool) -> None:
        self._calls(tokenizer())
        # Whether the data puts BOS in front is known when the evaluation opens.
        longest = min(self._longest(tokenizer(), bos) for bos in (True, False, None))
        check_fits("evals: type samples: a prompt", longest, self.max_new_tokens, seq_len)

    def check_model(self, model: LanguageModel, references: Mapping[str, LanguageModel] | None) -> None:
        if model.is_causal and self.denoising is not None:
            raise ConfigError(
                "evals: type samples: denoising given, but the model generates token by token, because its tokens attend only"
                " to earlier ones. Remove it"
            )
        penalty = None if self.repetition_penalty == 1 else self.repetition_penalty
        unused = {"tool": self.tool, "cache_dtype": self.cache_dtype, "repetition_penalty": penalty}
        if not model.is_causal and (name := next((key for key, value in unused.items() if value is not None), None)):
            raise ConfigError(
                f"evals: type samples: {name}: {unused[name]} given, but a model whose tokens attend to later ones fills in"
                " masks in any order, without a cache or calls. Remove it"
            )
        denoising = self.denoising or DenoisingConfig()
        if not model.is_causal and denoising.schedule == "equal":
            with _of_denoising():
                denoising.passes(self.max_new_tokens)
        if self.denoising is not None:
            with _of_denoising():
                self.denoising.check_parts(model.traits.denoisers)

    def _longest(self, tokenizer: Any, bos: bool | None) -> int:
        return max(len(prompt_ids(tokenizer, prompt, bos=bos)) for prompt in self.prompts)

    def _calls(self, tokenizer: Any) -> ToolCalls | None:
        return None if self.tool is None else ToolCalls.of(self.tool, tokenizer, "evals: type samples: tool")

    def open(self, ctx: EvalContext) -> Eval:
        self.check()
        longest = self._longest(ctx.tokenizer, ctx.enforce_bos)
        check_fits("evals: type samples: a prompt", longest, self.max_new_tokens, ctx.seq_len)
        return SamplesEval(self, ctx, self._calls(ctx.tokenizer))


class SamplesEval(Eval):
    """Prints and logs samples, and returns no metrics."""

    def __init__(self, config: SamplesEvalConfig, ctx: EvalContext, calls: ToolCalls | None):
        self._config = config
        self._calls = calls
        self._ctx = ctx

    def run(self, model: LanguageModel) -> dict[str, float]:
        config, tokenizer = self._config, self._ctx.tokenizer
        prompts = [prompt_ids(tokenizer, prompt, bos=self._ctx.enforce_bos) for prompt in config.prompts]
        generation = GenerationConfig.of(config, stop_ids=tokenizer.stop_ids)
        if model.is_causal:
            batched = self._ctx.batched(model, len(prompts))
            continuations = batched.generate(prompts, generation, tools=self._calls)
        else:
            cast = self._ctx.cast(model)
            continuations = denoised(cast, prompts, generation, tokenizer.mask_id, config.denoising)
        for prompt, ids in zip(config.prompts, continuations, strict=True):
            text = tokenizer.decode(ids) if self._calls is None else self._calls.show(ids)
            self._ctx.log(textwrap.indent(prompt + text, "  | ", lambda _line: True))
            self._ctx.log_sample(prompt, text)
        return {}


@contextlib.contextmanager
def _of_denoising() -> Iterator[None]:
    """Names the section of the keys in a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"evals: type samples: denoising.{error}") from error
