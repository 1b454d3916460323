"""The members of a scaling study: one ordinary run for each budget and depth, started here or on a Ray cluster.

Each member is started as the command `jaxlm train`, here one after another. One that was stopped resumes from its newest
checkpoint, as every run does.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxlm.core.errors import ConfigError, counted
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
from jaxlm.systems.nanochat.scaling_law import PowerLaw, ScalingLaw, TrainedPoint


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
    """Sets which models to train, and what to measure them by.

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
    """Records what a member that has finished adds to the fit.

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


def plan_table(members: Sequence[Member], finished: Collection[str]) -> str:
    """Lists what the study trains. Args: finished: names of the members that need no training."""
    return _table(
        ("run", "depth", "FLOPs", "scaling parameters", "tokens", "steps", ""),
        (
            (
                member.name,
                str(member.depth),
                f"{member.budget:g}",
                f"{member.size.num_parameters:,}",
                f"{member.size.num_tokens:,}",
                f"{member.size.num_steps:,}",
                "finished" if member.name in finished else "",
            )
            for member in members
        ),
    )


def member_table(results: Sequence[MemberResult]) -> str:
    """Lists what each member reached."""
    metric = results[0].metric if results else "loss"
    return _table(
        ("FLOPs", "depth", "scaling parameters N", "tokens D", "D / N", metric),
        (
            (
                f"{one.budget:g}",
                str(one.depth),
                f"{one.num_parameters:,}",
                f"{one.num_tokens:,}",
                f"{one.num_tokens / one.num_parameters:.2f}",
                f"{one.value:.4f}",
            )
            for one in results
        ),
    )


def law_table(law: ScalingLaw) -> str:
    """Lists the minimum of each budget, and the power laws."""
    rows = []
    for p in law.parabolas:
        if p.num_parameters is None or p.num_tokens is None or p.loss is None:
            rows.append((f"{p.budget:g}", p.problem, "", "", ""))
        else:
            ratio = p.num_tokens / p.num_parameters
            rows.append(
                (f"{p.budget:g}", f"{p.num_parameters:.4g}", f"{p.num_tokens:.4g}", f"{ratio:.2f}", f"{p.loss:.4f}")
            )
    table = _table(("FLOPs C", "best N", "best D", "D / N", "loss"), rows)
    if law.parameters is None or law.tokens is None:
        return f"{table}\n\nNo scaling law: {law.problem}."
    return f"{table}\n\n{_formula('N_opt', law.parameters)}, {_formula('D_opt', law.tokens)}"


def _formula(name: str, law: PowerLaw) -> str:
    return f"{name} = {law.factor:.4g} x C^{law.exponent:.4f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Log = Callable[[str], None]
_CONNECT_S = 10
_RETRIES = 5  # of a member whose machine is lost
# Becomes a command that the kernel kills together with its parent (1 is PR_SET_PDEATHSIG), so that a run never trains twice.
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
_SHOWN = 300  # characters of an error of Ray


def train_here(members: Sequence[Member]) -> Generator[tuple[Member, int], None, None]:
    """Trains members one after another. Yields each with its exit code."""
    for member in members:
        yield member, run_command(command_of(member))


def train_on_ray(
    members: Sequence[Member], config: MemberRayConfig, log: Log
) -> Generator[tuple[Member, int], None, None]:
    """Trains members on a Ray cluster, as many at a time as have room. Yields each with its exit code as it ends.

    Raises:
        ConfigError: the cluster cannot be reached or started, or has no machine with room for a member.
    """
    import ray
    import ray.exceptions

    address = config.address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address is not None:
            _check_listens(address)
        ray.init(address=address or "local", include_dashboard=False if address is None else None)
    except (OSError, RuntimeError, ValueError) as error:
        what = "a cluster cannot be started" if address is None else f"'{address}' cannot be reached"
        raise ConfigError(
            f"scaling.ray.address: {what} ({str(error)[:_SHOWN]}). Start one with `ray start --head`, or remove scaling.ray"
        ) from error
    try:
        _check_room(ray.nodes(), config)
        task = ray.remote(num_cpus=config.cpus, num_gpus=config.gpus, max_retries=_RETRIES)(_run_in)
        running = {task.remote(command_of(member), os.getcwd()): member for member in members}
        log(f"ray: {counted(len(members), 'member')} on {counted(len(ray.nodes()), 'machine')}")
        while running:
            (ended, *_), _ = ray.wait(list(running), num_returns=1)
            member = running.pop(ended)
            try:
                yield member, ray.get(ended)
            except ray.exceptions.RayError as error:
                log(f"{member.name}: {type(error).__name__}: {str(error)[:_SHOWN]}")
                yield member, 1
    finally:
        ray.shutdown()  # ends what still runs


def _check_listens(address: str) -> None:
    """Raises `OSError` soon if nothing listens at the address; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _check_room(nodes: Sequence[dict], config: MemberRayConfig) -> None:
    """Raises `ConfigError` if no machine is large enough: Ray itself would wait for one forever."""
    sizes = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(size.get("CPU", 0) >= config.cpus and size.get("GPU", 0) >= config.gpus for size in sizes):
        has = "; ".join(f"{size.get('CPU', 0):g} cores and {size.get('GPU', 0):g} GPUs" for size in sizes)
        raise ConfigError(
            f"scaling.ray: {config.cpus} cores and {config.gpus} GPUs for each member, but the machines have {has}. Lower"
            " cpus or gpus"
        )


def command_of(member: Member) -> list[str]:
    """Returns the command that trains a member."""
    return [sys.executable, "-m", "jaxlm.train", "--config_path", str(member.config_path)]


def _run_in(command: Sequence[str], folder: str) -> int:
    os.chdir(folder)
    return run_command(command)


def run_command(command: Sequence[str]) -> int:
    """Runs a command to its end and returns its exit code. SIGTERM and Ctrl-C are passed on, so that it saves and ends."""
    # A session of its own: a terminal would send Ctrl-C to both, and a run takes a second one as an order to end at once.
    bound = [sys.executable, "-c", _WITH_PARENT, *command] if sys.platform == "linux" else command
    process = subprocess.Popen(bound, start_new_session=True)
    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda received, _: process.send_signal(received))
    except ValueError:  # not the main thread, in a Ray worker: it is killed with its child
        pass
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
    return code if code >= 0 else 128 - code
