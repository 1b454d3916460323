"""A reward that is a function of your own."""

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.logged import ScoredRows
from jaxlm.reading.choices import choice, import_name
from jaxlm.systems.rl.rewards.base import Reward, RewardConfig, RewardContext

_OF_BATCH = ("prompts", "completions", "completion_ids", "is_finished", "places")
_OF_ROW = ("prompt", "completion", "completion_ids", "is_finished", "place")


@choice(RewardConfig, "function")
class FunctionRewardConfig(RewardConfig):
    """A Python function, which may be `async def`. It gets keyword arguments by the names of its parameters.

    Attributes:
        function: `package.module:name`, or `path/to/file.py:name`.
        per: `batch` calls it once for all completions. Its parameters `prompts`, `completions`, `completion_ids`,
            `is_finished`, `places`, and those named like a column of the records, get lists. It returns a list. With
            `**kwargs`, it gets all columns, as TRL's reward functions do. `row` calls it for each completion: `prompt`,
            `completion`, `completion_ids`, `is_finished`, `place` and the columns are the values of that one.
    """

    function: str
    per: Literal["batch", "row"] = "batch"

    @property
    def default_name(self) -> str:
        return self.function.rpartition(":")[2]

    def check(self) -> None:
        module, _, name = self.function.rpartition(":")
        if not (module and name):
            raise ConfigError(
                f"reward of type function: function: '{self.function}' given, `package.module:name` or"
                " `path/to/file.py:name` expected"
            )
        if module.endswith(".py") and not Path(module).is_file():
            raise ConfigError(
                f"reward of type function: function: there is no file {module} in {Path.cwd()}. Correct the path"
            )

    def open(self, context: RewardContext) -> Reward:
        function = _load(self.function)
        if not callable(function):
            what = "nothing" if function is None else f"a {type(function).__name__}"
            raise ConfigError(f"function: '{self.function}' names {what}, a function expected")
        return FunctionReward(function, self.per)


class FunctionReward(Reward):
    """Calls the function with the arguments that it has parameters for."""

    def __init__(self, function: Callable[..., Any], per: Literal["batch", "row"]):
        self._function, self._per = function, per
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        arguments = _OF_BATCH if per == "batch" else _OF_ROW
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if by_position := [p.name for p in named if p.kind is p.POSITIONAL_ONLY]:
            raise ConfigError(f"the parameter '{by_position[0]}' is positional-only, but arguments are passed by name")
        self._parameters = {p.name for p in named}
        self._columns = tuple(p.name for p in named if p.default is p.empty and p.name not in arguments)
        # Rows of an async function are scored at the same time: it may wait for a server.
        self.scores_alone = per == "row" and not inspect.iscoroutinefunction(function)

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    def score(self, rows: ScoredRows) -> list[float | None]:
        if self._per == "batch":
            result = self._function(**self._arguments(_OF_BATCH, rows))
            return asyncio.run(_gathered([result]))[0] if inspect.isawaitable(result) else result
        results = [self._function(**self._of_row(rows, number)) for number in range(len(rows))]
        return asyncio.run(_gathered(results)) if inspect.isawaitable(results[0]) else results

    def _of_row(self, rows: ScoredRows, number: int) -> Mapping[str, Any]:
        known = self._arguments(_OF_ROW, rows.row(number))
        return {name: values[0] for name, values in known.items()}

    def _arguments(self, names: tuple[str, ...], rows: ScoredRows) -> Mapping[str, list[Any]]:
        lists = (rows.prompts, rows.completions, rows.completion_ids, rows.is_finished, rows.places)
        known = {**rows.columns, **dict(zip(names, lists, strict=True))}
        known = {name: list(values) for name, values in known.items()}
        return known if self._takes_all else {name: known[name] for name in self._parameters if name in known}


async def _gathered(results: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*results))


def _load(path: str) -> Any:
    """Imports `package.module:name`, or runs `path/to/file.py` as a module that may import the files beside it."""
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return import_name(path)
    location = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(location.stem, location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(location.parent))
    sys.modules.setdefault(location.stem, module)  # dataclasses and pickle look a module up by its name
    spec.loader.exec_module(module)
    return getattr(module, name, None)
