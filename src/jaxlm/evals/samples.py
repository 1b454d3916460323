"""Text from the model, to be read by people."""

import textwrap
from dataclasses import dataclass, field

import jax

from jaxlm.core.errors import ConfigError
from jaxlm.evals.base import Eval, EvalConfig, EvalContext
from jaxlm.models.base import LanguageModel
from jaxlm.models.inference.generate import generate


@EvalConfig.register_subclass("samples")
@dataclass(frozen=True)
class SamplesEvalConfig(EvalConfig):
    """Continues a few prompts and prints the result.

    Attributes:
        prompts: texts to continue.
        max_new_tokens: for each prompt; fewer where the text ends.
        temperature: 0 takes the most likely token every time.
        top_k: choose among so many of the likeliest tokens; None means all.
        top_p: choose among the likeliest tokens that make up this much probability; None means all.
        seed: of the sampling; the same model and seed give the same text.
    """

    prompts: list[str] = field(default_factory=lambda: [""])
    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def open(self, ctx: EvalContext) -> Eval:
        """Raises `ConfigError` where there is nothing to sample."""
        if not self.prompts or self.max_new_tokens < 1:
            raise ConfigError("evals: type samples needs at least one prompt and max_new_tokens of 1 or more")
        return SamplesEval(self, ctx)


class SamplesEval(Eval):
    """Prints samples; its numbers are none."""

    def __init__(self, config: SamplesEvalConfig, ctx: EvalContext):
        self._config = config
        self._ctx = ctx
        self._cast = jax.jit(ctx.precision.to_compute)

    def run(self, model: LanguageModel) -> dict[str, float]:
        """Shows each prompt with its continuation."""
        config, tokenizer = self._config, self._ctx.tokenizer
        continuations = generate(
            self._cast(model),
            [prompt_ids(tokenizer, prompt) for prompt in config.prompts],
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
            eos_id=tokenizer.eos_id,
        )
        for prompt, ids in zip(config.prompts, continuations, strict=True):
            self._ctx.log(textwrap.indent(prompt + tokenizer.decode(ids), "  | ", lambda _line: True))
        return {}


def prompt_ids(tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens, after the token that begins every document."""
    ids = tokenizer.encode_batch([prompt])[0]
    return ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids]
