"""Scores of a reward model: one on an inference server, or a sequence classifier of Hugging Face in the reward's process."""

import importlib.util
from collections.abc import Sequence
from string import Formatter
from typing import Any, ClassVar, Literal

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.install import install_command
from jaxlm.core.rules import Rules, one_of
from jaxlm.core.values.logged import ScoredRows
from jaxlm.reading.choices import choice
from jaxlm.systems.rl.json_server import JsonServer, ServerConfig
from jaxlm.systems.rl.rewards.base import Reward, RewardConfig, RewardContext

_KEY = "reward of type model"
_LIBRARIES = ("torch", "transformers")


@choice(RewardConfig, "model")
class ModelRewardConfig(RewardConfig):
    """The output of a reward model: a sequence classifier with one label. Set `path` or `server`.

    Attributes:
        path: folder or Hub name of a sequence classifier. It runs on the CPU in the reward's process, with transformers
            and torch in float32 (the extras `hf` and `torch`), one completion at a time.
        server: a server of the model (`vllm serve MODEL --runner pooling`; SGLang with `--is-embedding`).
        protocol: whose server it is. `vllm` asks `/classify` for values without activation, `sglang` its own `/classify`.
        text: what the model reads, as a template with `{prompt}`, `{completion}` and the columns of the records in braces.
        batch_size: number of texts per request to the server.
    """

    key_rules: ClassVar[Rules] = (one_of("path", "server"),)

    path: str | None = None
    server: ServerConfig | None = None
    protocol: Literal["vllm", "sglang"] = "vllm"
    text: str = "{prompt}{completion}"
    batch_size: PositiveInt = 32

    def check(self) -> None:
        if self.server is not None:
            self.server.check(f"{_KEY}: server")
        elif missing := [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"{_KEY}: path needs {' and '.join(missing)}. Run: {install_command('hf', 'torch')}. Or run the model"
                " on a server"
            )
        self.columns()

    def columns(self) -> tuple[str, ...]:
        """The columns in the template."""
        try:
            names = [name for _, name, _, _ in Formatter().parse(self.text) if name is not None]
        except ValueError as error:
            raise ConfigError(
                f"{_KEY}: text: '{self.text}' is not a template: {error}. Write {{{{ for a brace"
            ) from error
        if bad := [name for name in names if not name.isidentifier()]:
            raise ConfigError(f"{_KEY}: text: '{{{bad[0]}}}' given, the name of a column expected")
        if "completion" not in names:
            raise ConfigError(f"{_KEY}: text: '{self.text}' does not contain {{completion}}")
        return tuple(name for name in dict.fromkeys(names) if name not in ("prompt", "completion"))

    def open(self, context: RewardContext) -> Reward:
        if self.server is not None:
            server = JsonServer(self.server)
            server.check_reachable(wait=not context.dry)
            return ServedReward(self, server)
        assert self.path is not None
        return ClassifierReward(self, *_classifier(self.path))


def _texts(config: ModelRewardConfig, rows: ScoredRows) -> list[str]:
    columns = config.columns()
    return [
        config.text.format(prompt=prompt, completion=completion, **{name: rows.columns[name][n] for name in columns})
        for n, (prompt, completion) in enumerate(zip(rows.prompts, rows.completions, strict=True))
    ]


class ServedReward(Reward):
    """Asks a server."""

    scores_alone = False  # the server batches

    def __init__(self, config: ModelRewardConfig, server: JsonServer):
        self._config, self._server = config, server

    @property
    def columns(self) -> tuple[str, ...]:
        return self._config.columns()

    def score(self, rows: ScoredRows) -> list[float | None]:
        texts, size = _texts(self._config, rows), self._config.batch_size
        return [score for start in range(0, len(texts), size) for score in self._scores(texts[start : start + size])]

    def _scores(self, texts: Sequence[str]) -> list[float]:
        try:
            if self._config.protocol == "vllm":
                answer = self._server.post("/classify", {"input": texts, "use_activation": False})
                outputs = [one["probs"] for one in sorted(answer["data"], key=lambda one: one["index"])]
            else:
                outputs = [one["embedding"] for one in self._server.post("/classify", {"text": texts})]
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"the answer of the server is not that of protocol: {self._config.protocol} ({error!r}). Set another protocol"
            ) from error
        if len(outputs) != len(texts) or any(len(one) != 1 for one in outputs):
            sizes = sorted({len(one) for one in outputs})
            raise ConfigError(
                f"the server returned {len(outputs)} outputs with {sizes} values for {len(texts)} texts, but one value for"
                " each is expected. Serve a sequence classifier with one label"
            )
        return [float(one[0]) for one in outputs]


class ClassifierReward(Reward):
    """Runs a sequence classifier."""

    def __init__(self, config: ModelRewardConfig, tokenizer: Any, model: Any):
        self._config, self._tokenizer, self._model = config, tokenizer, model

    @property
    def columns(self) -> tuple[str, ...]:
        return self._config.columns()

    def score(self, rows: ScoredRows) -> list[float | None]:
        import torch  # pyright: ignore[reportMissingImports] - extras

        with torch.inference_mode():
            encoded = (self._tokenizer(text, return_tensors="pt") for text in _texts(self._config, rows))
            return [float(self._model(**one).logits[0, 0]) for one in encoded]


def _classifier(path: str) -> tuple[Any, Any]:
    import torch  # pyright: ignore[reportMissingImports] - extras
    import transformers  # pyright: ignore[reportMissingImports] - extras

    try:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"path: {path} cannot be loaded: {error}") from error
    if model.config.num_labels != 1:
        raise ConfigError(
            f"path: {path} has {model.config.num_labels} labels, a reward model with one label (num_labels: 1) expected"
        )
    return tokenizer, model.eval()
