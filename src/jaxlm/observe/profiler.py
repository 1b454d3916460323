"""Records a profile of a few training steps of each phase, and summarizes where the devices' time went."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlm.core.errors import counted
from jaxlm.core.field_types import PositiveInt
from jaxlm.core.redaction import write_text
from jaxlm.core.runtime import is_main_process
from jaxlm.core.values.logged import Activity
from jaxlm.engine.loop import PAUSE
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.hardware.hlo import CONTAINERS, KINDS, Operation, operation_by_name, operations

_MOST_SHOWN = 20
_SOURCE_LENGTH = 60
_DEVICE_LINES = ("Stream", "XLA Ops")
_NO_OPERATION = ("ThreadpoolListener", "end: ", "$")


@dataclass(frozen=True)
class ProfileEvent:
    """One execution of an operation on a device. Times are nanoseconds."""

    device: str
    line: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class OperationTime:
    """Total time of one operation over all devices and steps."""

    name: str
    operation: Operation
    seconds: float
    num_calls: int


@dataclass(frozen=True)
class Profile:
    """Describes where the devices' time went in the recorded steps.

    Attributes:
        spent: time by operation, largest first. Operations that overlap on a device each count in full.
        num_devices: number of devices that ran any operation.
        seconds: time from the first operation to the end of the last, without pauses; the mean over devices.
        idle: fraction of `seconds` in which a device ran nothing.
        paused: seconds in which the loop waited for evaluations and saves, from the operation before to the operation
            after; the mean over devices. Operations that ran in a pause are not in `spent`.
    """

    spent: tuple[OperationTime, ...]
    num_devices: int
    num_steps: int
    seconds: float
    idle: float
    paused: float

    def by_kind(self) -> dict[str, float]:
        """Kind -> seconds, largest first."""
        sums: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for item in self.spent:
            sums[item.operation.kind] += item.seconds
        return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def summarize(
    events: Iterable[ProfileEvent],
    operations: Mapping[str, Operation],
    num_steps: int,
    pauses: Sequence[tuple[float, float]] = (),
) -> Profile | None:
    """Sums the events by operation; None if there are none.

    An operation counts without the operations nested in it. Loops and branches do not count. `pauses` are the start and
    end in nanoseconds of each pause of the training loop.
    """
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    lines: dict[tuple[str, str], list[ProfileEvent]] = defaultdict(list)
    for event in events:
        lines[event.device, event.line].append(event)
    busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (device, _), line in lines.items():
        for event, self_time in _self_times(line):
            if not CONTAINERS.match(event.name):
                seconds[event.name] += self_time / 1e9
                calls[event.name] += 1
                busy[device].append((event.start, event.end))
    if not busy:
        return None
    gaps = [list(_gaps(parts)) for parts in busy.values()]
    paused = [
        sum(end - start for start, end in one if any(begin < end and start < stop for begin, stop in pauses))
        for one in gaps
    ]
    spans = [
        max(end for _, end in parts) - min(start for start, _ in parts) - excluded
        for parts, excluded in zip(busy.values(), paused, strict=True)
    ]
    idle = sum(end - start for one in gaps for start, end in one) - sum(paused)
    spent = [
        OperationTime(name, operations.get(name) or operation_by_name(name), seconds[name], calls[name])
        for name in seconds
    ]
    return Profile(
        spent=tuple(sorted(spent, key=lambda item: -item.seconds)),
        num_devices=len(busy),
        num_steps=num_steps,
        seconds=sum(spans) / len(spans) / 1e9,
        idle=idle / max(sum(spans), 1e-9),
        paused=sum(paused) / len(paused) / 1e9,
    )


def describe_profile(profile: Profile, title: str) -> str:
    """The profile as one page of Markdown."""
    total = sum(item.seconds for item in profile.spent) or 1.0
    ms = lambda seconds: f"{seconds / profile.num_steps / profile.num_devices * 1e3:.3f}"  # noqa: E731
    step_ms = profile.seconds / profile.num_steps * 1e3
    lines = [
        f"# {title}",
        "",
        f"{counted(profile.num_steps, 'step')} on {counted(profile.num_devices, 'device')}, {step_ms:.3f} ms per step.",
        f"Devices were idle {profile.idle:.1%} of the time. The tables show ms per step and device; operations that",
        "overlap, such as those on a CPU's threads, are summed. Recording slows steps down (on CPU to about half the",
        "speed), so compare the shares. `throughput/duration` has the step times without recording.",
        *([f"Excluded: {profile.paused:.3f} s of evaluations and saves between steps."] if profile.paused else []),
        "",
        "| kind | ms | share |",
        "|---|---|---|",
        *[f"| {kind} | {ms(seconds)} | {seconds / total:.1%} |" for kind, seconds in profile.by_kind().items()],
        "",
        "| operation | kind | ms | share | calls per step | source |",
        "|---|---|---|---|---|---|",
    ]
    for item in profile.spent[:_MOST_SHOWN]:
        source = item.operation.source.replace("|", "/")
        shown = source if len(source) <= _SOURCE_LENGTH else "..." + source[3 - _SOURCE_LENGTH :]
        calls = item.num_calls / profile.num_steps / profile.num_devices
        share = f"{ms(item.seconds)} | {item.seconds / total:.1%} | {calls:.3g}"
        lines.append(f"| {item.name} | {item.operation.kind} | {share} | {shown} |")
    if (more := len(profile.spent) - _MOST_SHOWN) > 0:
        rest = sum(item.seconds for item in profile.spent[_MOST_SHOWN:])
        lines.append(f"| {more} more | | {ms(rest)} | {rest / total:.1%} | | |")
    return "\n".join(lines) + "\n"


def _pauses(planes: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Start and end of each pause (`jaxlm.engine.loop.pause`)."""
    for plane in planes:
        if not plane.name.startswith("/device:"):
            pauses = (event for line in plane.lines for event in line.events if event.name == PAUSE)
            yield from ((event.start_ns, event.start_ns + event.duration_ns) for event in pauses)


def _events(planes: Iterable[Any], program: str) -> Iterator[ProfileEvent]:
    """Executions in the trace: on GPU and TPU each device has a plane; on CPU they are in the host's threads."""
    for plane in planes:
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            # A device's other lines repeat the same time by module or by step.
            if not on_device or line.name.startswith(_DEVICE_LINES):
                events = (_event(event, plane.name, line.name, program, on_device) for event in line.events)
                yield from (event for event in events if event is not None)


def _event(event: Any, plane: str, line: str, program: str, on_device: bool) -> ProfileEvent | None:
    """The trace entry as an event; None if it is not an operation of the program."""
    if event.name.startswith(_NO_OPERATION):
        return None
    stats: dict[Any, Any] = dict(event.stats)
    name = stats.get("hlo_op") or (event.name if on_device else None)
    module = str(stats.get("hlo_module", program)).partition("(")[0]
    if name is None or module != program:
        return None
    device = plane if on_device else f"{plane} {stats.get('device_ordinal', 0)}"
    short = str(name).partition(" = ")[0].lstrip("%")
    return ProfileEvent(device, line, short, event.start_ns, event.start_ns + event.duration_ns)


def _self_times(line: list[ProfileEvent]) -> Iterator[tuple[ProfileEvent, float]]:
    """Each event of one line with its duration minus the durations of the events nested in it."""
    open_events: list[tuple[ProfileEvent, list[float]]] = []
    for event in sorted(line, key=lambda e: (e.start, -e.end)):
        while open_events and open_events[-1][0].end <= event.start:
            done, nested = open_events.pop()
            yield done, done.end - done.start - sum(nested)
        if open_events:
            open_events[-1][1].append(event.end - event.start)
        open_events.append((event, []))
    for done, nested in reversed(open_events):
        yield done, done.end - done.start - sum(nested)


def _gaps(parts: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    (_, reached), *rest = sorted(parts)
    for start, end in rest:
        if start > reached:
            yield reached, start
        reached = max(end, reached)


SUMMARY = "profile.md"


@dataclass(frozen=True)
class ProfilerConfig:
    """Records a profile of some steps of each phase. Steps are counted from where this process starts or resumes the phase.

    Attributes:
        start_step: number of steps to skip before recording starts; the first steps are not representative.
        num_steps: number of steps to record. Recording stops early if the batch size, and thus the program, changes.
    """

    start_step: PositiveInt = 5
    num_steps: PositiveInt = 10


@dataclass(eq=False)
class ProfileHook:
    """Starts and stops the JAX profiler between steps, on process 0, and writes a one-page summary.

    If profiling fails, the failure is logged and the run continues.

    Attributes:
        first_step: steps done when this process starts or resumes the phase.
        until: steps done when the compiled program changes or the phase ends.
        program: returns the HLO text of the compiled step.
    """

    activity = Activity.SAVE

    config: ProfilerConfig
    folder: Path
    phase: Phase
    first_step: int
    until: int
    program: Callable[[], str]
    log: Callable[[str], None]

    def __post_init__(self):
        self._begin = self.first_step + self.config.start_step
        self._end = min(self._begin + self.config.num_steps, self.until)
        self._recording = False
        if self._begin >= self.phase.end:
            self.log(
                f"profiler: nothing to record: phase '{self.phase.name}' ends at step {self.phase.end}, before recording"
                " starts (trainer.profiler.start_step)"
            )
        elif self._end < min(self._begin + self.config.num_steps, self.phase.end):
            self.log(
                f"profiler: recording only steps {self._begin + 1} to {self._end}, because the batch size changes after them"
            )

    def due(self, step: int) -> bool:
        """Tells whether recording starts or stops after this step."""
        return step in (self._begin, self._end) and self._begin < self._end

    def run(self, step: int, state: RunState) -> None:
        """Starts recording, or stops it and writes the summary."""
        if not is_main_process():
            return
        try:
            if step == self._begin:
                self._start()
            elif self._recording:
                self._stop()
        # A profiler failure of any kind must not stop the run.
        except Exception as failure:
            self.log(f"profiler: failed ({type(failure).__name__}: {failure}); the run continues without a profile")

    def close(self) -> None:
        """Stops a recording that is still active when the run ends."""
        if self._recording:
            self._recording = False
            try:
                jax.profiler.stop_trace()
            except (RuntimeError, OSError) as failure:
                self.log(f"profiler: failed ({type(failure).__name__}: {failure})")

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # otherwise Python calls make up most of the file
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._recording = True

    def _stop(self) -> None:
        from jax.profiler import ProfileData

        self._recording = False
        jax.profiler.stop_trace()
        traces = sorted(self.folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
        text = self.program()
        name = text.partition(",")[0].removeprefix("HloModule ").strip()
        num_steps = self._end - self._begin
        planes = list(ProfileData.from_file(str(traces[-1])).planes) if traces else []
        profile = summarize(_events(planes, name), operations(text), num_steps, list(_pauses(planes)))
        if profile is None:
            self.log(f"profiler: the trace in {self.folder} has no operation of the training step; no summary written")
            return
        title = f"Profile of phase '{self.phase.name}', steps {self._begin + 1} to {self._end}"
        write_text(self.folder / SUMMARY, describe_profile(profile, title))
        most = next(iter(profile.by_kind()))
        self.log(
            f"profile of {num_steps} steps: {self.folder / SUMMARY} (most time in: {most}, idle: {profile.idle:.1%})"
        )
