"""The members of a scaling study: one ordinary run for each budget and depth, as a configuration file of its own."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import NonNegativeInt, PositiveFloat, PositiveInt
from jaxlm.core.safe_io import atomic_file, read_text
from jaxlm.core.stores import is_url
from jaxlm.observe.records import METRICS, read_metrics
from jaxlm.plan.controllers import check_metric
from jaxlm.plan.load_config import decode_run, run_id_of
from jaxlm.plan.plan import plan_phases
from jaxlm.plan.presets.base import RunSize, given_at
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import config_error, decode
from jaxlm.reading.yaml import ConfigSource, merge
from jaxlm.session.scaling.law import TrainedPoint


@dataclass(frozen=True)
class MemberRayConfig:
    """The Ray cluster on which members train at the same time. jaxlm and the data must be on its machines, which share the
    folder in which you start the command.

    Attributes:
        address: `host:port` of a running cluster; null uses the environment variable RAY_ADDRESS, or starts a cluster here.
        cpus: cores that a member reserves.
        gpus: GPUs that a member reserves.
    """

    address: str | None = None
    cpus: PositiveInt = 1
    gpus: NonNegativeInt = 0


@dataclass(frozen=True)
class ScalingConfig:
    """Which models to train, and what to measure them by.

    Attributes:
        depths: `preset.depth` of the members.
        budgets: FLOPs that each depth is trained with, as `preset.target_flops`.
        metric: what is fitted, the last value that the member logs; lower is better.
        output_dir: folder of the members' files and of the results.
        ray: train the members on a Ray cluster, as many at a time as it has room for. Null trains them here, one after
            another.
    """

    depths: list[PositiveInt]
    budgets: list[PositiveFloat]
    metric: str = "eval/bpb"
    output_dir: str = "scaling"
    ray: MemberRayConfig | None = None


@dataclass(frozen=True)
class ScalingRunConfig(RunConfig):
    """...

    Attributes:
        scaling: depths and budgets of the study.
    """

    scaling: ScalingConfig | None = None


@dataclass(frozen=True)
class MemberResult:
    """What a member that has finished adds to the fit.

    Attributes:
        num_parameters: the scaling parameters.
        metric: name of what was measured; `value` is its last value.
    """

    name: str
    depth: int
    budget: float
    num_parameters: int
    num_tokens: int
    num_steps: int
    flops_per_token: int
    metric: str
    value: float

    @property
    def point(self) -> TrainedPoint:
        return TrainedPoint(self.budget, self.num_parameters, self.num_tokens, self.value)


@dataclass(frozen=True)
class Member:
    """A run of the study.

    Attributes:
        name: its `trainer.id`.
        config: its configuration, complete.
        text: the content of its configuration file.
        folder: where its file and its result are.
    """

    name: str
    depth: int
    budget: float
    config: RunConfig = field(repr=False)
    text: str = field(repr=False)
    size: RunSize
    folder: Path
    metric: str

    @property
    def config_path(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    @property
    def result_path(self) -> Path:
        return self.folder / f"{self.name}.json"

    def write(self) -> None:
        self._write_file(self.config_path, self.text)

    def _write_file(self, file: Path, text: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as path:
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"scaling.output_dir: {self.folder} cannot be written ({error.strerror}). Set it to a writable folder, or"
                " free some space"
            ) from error

    def result(self) -> MemberResult | None:
        """The result of a member that has finished; None if it has not.

        Raises:
            ConfigError: it was trained with another configuration, or measured by another metric.
        """
        if not self.result_path.exists():
            return None
        try:
            saved = self._checked(json.loads(read_text(self.result_path)))
            text = read_text(self.config_path)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{self.result_path}: cannot be read ({error}). Delete it, and the command measures the run again"
            ) from error
        if text != self.text:
            raise ConfigError(
                f"{self.name} has finished with the keys in {self.config_path}, which differ from those given now. Set"
                " another scaling.output_dir and trainer.id, or delete the file, its .json, and the checkpoints and logs"
            )
        return saved if saved.metric == self.metric else self.measure()

    def _checked(self, content: Any) -> MemberResult:
        """The result in a file of this member. Raises `ValueError` or `TypeError` if it cannot be one."""
        saved = MemberResult(**content)
        if (saved.name, saved.depth, saved.budget) != (self.name, self.depth, self.budget):
            raise ValueError(f"a result of {saved.name!r}, depth {saved.depth!r}, {saved.budget!r} FLOPs")
        counts = (saved.num_parameters, saved.num_tokens, saved.num_steps, saved.flops_per_token)
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError("its sizes are not positive integers")
        if not (isinstance(saved.value, (int, float)) and math.isfinite(saved.value)):
            raise ValueError(f"value: {saved.value!r}, a number expected")
        return saved

    def measure(self) -> MemberResult:
        """Reads the last value of the metric from the logs of a run that has finished, and saves the result."""
        log = Path(self.config.trainer.log_dir) / self.name / METRICS
        records = read_metrics(log) if log.exists() else []
        values = [record[self.metric] for record in records if record.get(self.metric) is not None]
        if not values:
            names = sorted({name for record in records for name in record if name.startswith("eval/")})
            raise ConfigError(
                f"scaling.metric: '{self.metric}' given, but {log} does not have it. It has {', '.join(names) or 'no eval'}"
            )
        measured = {"metric": self.metric, "value": float(values[-1])}
        result = MemberResult(self.name, self.depth, self.budget, **asdict(self.size), **measured)
        self._write_file(self.result_path, json.dumps(asdict(result), indent=1) + "\n")
        return result


@dataclass(frozen=True)
class _StudySection:
    scaling: ScalingConfig


def plan_study(source: ConfigSource, stem: str | None) -> tuple[ScalingConfig, list[Member]]:
    """The study in a configuration, and its members by budget and depth. All are decoded, so that no member fails late.

    Raises:
        ConfigError: the configuration describes no study, or one that cannot be trained.
    """
    tree = {key: value for key, value in source.tree.items() if key != "dry_run"}
    section = tree.pop("scaling", None)
    if section is None:
        raise ConfigError(
            "scaling: missing. Add the section, such as scaling: {depths: [4, 6, 8], budgets: [1.0e+15, 2.0e+15]}"
        )
    scaling = decode(_StudySection, ConfigSource({"scaling": section}, source.marks)).scaling
    if not isinstance(tree.get("preset"), Mapping):
        raise ConfigError("preset: missing. A study varies the depth of a preset: add preset: {type: depth_dial}")
    fixed = [
        ("preset", "depth"),
        ("preset", "target_flops"),
        ("preset", "num_iterations"),
        ("trainer", "num_train_steps"),
    ]
    for path in fixed:
        if given_at(tree, path) is not None:
            raise config_error(source, path, "given beside scaling, which sets depths and budgets. Remove it")
    for key in ("depths", "budgets"):
        values = getattr(scaling, key)
        if not values or len(set(values)) < len(values):
            raise config_error(source, ("scaling", key), f"{values} given, a list of different numbers expected")
    members = [
        _member(ConfigSource(tree, source.marks), scaling, depth, budget, stem)
        for budget in sorted(scaling.budgets)
        for depth in sorted(scaling.depths)
    ]
    if len({member.name for member in members}) < len(members):
        values = scaling.budgets
        raise config_error(source, ("scaling", "budgets"), f"{values} given, numbers that differ in 12 digits expected")
    return scaling, members


def _member(source: ConfigSource, scaling: ScalingConfig, depth: int, budget: float, stem: str | None) -> Member:
    named = decode_run(ConfigSource({k: v for k, v in source.tree.items() if k == "trainer"}, source.marks), stem)
    name = f"{run_id_of(named)}-{_short(budget)}-d{depth}"
    overrides = {"preset": {"depth": depth, "target_flops": budget}, "trainer": {"id": name}}
    tree: dict[str, Any] = merge(source.tree, overrides)
    try:
        config = decode_run(ConfigSource(tree, source.marks), None)
    except ConfigError as error:
        raise ConfigError(f"depth {depth} with {budget:g} FLOPs: {error}") from error
    check_metric(scaling.metric, "scaling.metric", config, plan_phases(config)[1])
    if is_url(config.trainer.log_dir):
        raise config_error(
            source,
            ("trainer", "log_dir"),
            f"'{config.trainer.log_dir}' given, but results are read from a local folder",
        )
    if config.trainer.distributed.num_processes not in (None, 1):
        raise config_error(
            source,
            ("trainer", "distributed"),
            "given, but jaxlm scaling starts each member as one process. Train the members' files one by one instead",
        )
    assert config.preset is not None
    size = config.preset.derive(ConfigSource(tree, source.marks)).size
    assert size is not None, "the preset has a depth"
    return Member(
        name,
        depth,
        budget,
        config,
        text=yaml.safe_dump(tree, sort_keys=False, width=100),
        size=size,
        folder=Path(scaling.output_dir) / "members",
        metric=scaling.metric,
    )


def _short(budget: float) -> str:
    """FLOPs as part of a name, as in `1.5e15`."""
    digits, exponent = f"{budget:.11e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
