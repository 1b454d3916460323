"""The report of cpu_peers.py: a table of the peers, how quiet the machine was, and all figures."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intervals import ratio_interval
from machine import Processor
from processes import spread

_COMPARED_LOSSES = 26  # later, rounding differences grow
_QUIET = 0.05  # of all cores; above this, the report warns


@dataclass(frozen=True)
class Started:
    """A peer's answer after its first step.

    Attributes:
        losses: of the first step.
        options: what jaxlm's step is traced and compiled with.
        dtype: of the products.
    """

    first_step_s: float
    losses: list[float]
    tokens_per_step: int
    flops_per_token: float
    version: str
    options: str = ""
    dtype: str = "float32"


@dataclass(frozen=True)
class Turn:
    """A peer's turn in a round.

    Attributes:
        seconds: of each step. The first follows a pause and is not measured.
        losses: of each step.
        peak_bytes: the most memory that the process has used so far.
        steal, others: see `machine.Use`.
        flops_before, flops_after: FLOP/s of a matrix product just before and after.
    """

    peer: str
    round: int
    seconds: list[float]
    losses: list[float]
    peak_bytes: int
    steal: float
    others: float
    flops_before: float
    flops_after: float

    @property
    def step_s(self) -> float:
        """Median seconds of the measured steps."""
        return statistics.median(self.seconds[1:])


def report(
    processor: Processor,
    started: Mapping[str, Started],
    turns: Sequence[Turn],
    peaks: Sequence[Mapping[str, float]],
    starts: Mapping[str, Sequence[tuple[float, float]]],
) -> dict[str, Any]:
    """Prints the report and returns its figures.

    Args:
        started: by peer; all are compared with the first.
        peaks: FLOP/s of large matrix products by library, at the beginning and at the end; in float32, unless the name ends
            with another dtype.
        starts: by peer, pairs of seconds to the first step, without and with cached programs.
    """
    fastest = fastest_of(peaks, turns)
    reference, num_rounds = next(iter(started)), len({turn.round for turn in turns})
    noise = noise_of(turns)
    library, peak = fastest["float32"]
    products = ", ".join(f"{flops / 1e9:,.0f} GFLOP/s ({name})" for name, flops in fastest.values())
    print(f"\n{processor}\n{num_rounds} rounds; fastest product: {products}")
    print(in_words(noise))
    print(
        f"\n{'':16}{'tokens/s (quartiles)':>26}{f'{reference} is ahead by (95 %)':>32}{'of the peak':>13}{'first step':>12}"
        f"{'memory':>11}{'loss differs by':>17}"
    )
    peers = {}
    for name, start in started.items():
        peers[name] = figures = figures_of(name, start, turns, reference, started)
        figures["share_of_peak"] = figures["tokens_per_second"] * start.flops_per_token / fastest[start.dtype][1]
        figures["starts"] = list(starts.get(name, ()))
        print(row(name, figures))
    for name, start in started.items():
        if start.options:
            print(f"{name}: {start.options}")
    for name, pairs in starts.items():
        if pairs:
            cold, warm = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            caches = f"{cold:.2f} s with an empty cache, {warm:.2f} s with a filled one"
            print(f"{name}: first step {caches} (medians of {len(pairs)})")
    facts = {"processor": str(processor), "rounds": num_rounds, "peak_flops": peak, "peak_library": library}
    return {**facts, "noise": noise, "peers": peers}


def fastest_of(peaks: Sequence[Mapping[str, float]], turns: Sequence[Turn]) -> dict[str, tuple[str, float]]:
    """Dtype -> the library with the fastest product, and its FLOP/s. In float32, the calibration counts too."""
    fastest = dict[str, tuple[str, float]]()
    for name, flops in (item for found in peaks for item in found.items()):
        dtype = name.split()[-1] if " " in name else "float32"
        fastest[dtype] = max(fastest.get(dtype, ("", 0.0)), (name, flops), key=lambda item: item[1])
    library, peak = fastest["float32"]
    calibrations = (flops for turn in turns for flops in (turn.flops_before, turn.flops_after))
    return fastest | {"float32": (library, max(peak, *calibrations))}


def figures_of(
    name: str, start: Started, turns: Sequence[Turn], reference: str, started: Mapping[str, Started]
) -> dict[str, Any]:
    """A peer's figures, compared with the reference in the same rounds."""
    own, other = (of_peer(turns, peer) for peer in (name, reference))
    rate, low, high = spread([start.tokens_per_step / turn.step_s for turn in own])
    losses, expected = (
        [*started[peer].losses, *(loss for turn in found for loss in turn.losses)][:_COMPARED_LOSSES]
        for peer, found in ((name, own), (reference, other))
    )
    ratios = [theirs.step_s / ours.step_s for theirs, ours in zip(own, other, strict=True)]
    return {
        "tokens_per_second": rate,
        "quartiles": [low, high],
        "ahead_by": None if name == reference else ratio_interval(ratios),
        "first_step_s": start.first_step_s,
        "peak_bytes": own[-1].peak_bytes,
        "loss_differs": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "version": start.version,
        "options": start.options,
    }


def of_peer(turns: Sequence[Turn], peer: str) -> list[Turn]:
    """A peer's turns by round."""
    return sorted((turn for turn in turns if turn.peer == peer), key=lambda turn: turn.round)


def noise_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """How quiet the machine was during the turns: medians and extremes."""
    products = [flops for turn in turns for flops in (turn.flops_before, turn.flops_after)]
    return {
        "steal": [statistics.median(turn.steal for turn in turns), max(turn.steal for turn in turns)],
        "others": [statistics.median(turn.others for turn in turns), max(turn.others for turn in turns)],
        "product_flops": [*spread(products), min(products), max(products)],
        "product_drift": statistics.median(abs(turn.flops_after / turn.flops_before - 1) for turn in turns),
    }


def in_words(noise: Mapping[str, Any]) -> str:
    """The noise, with a warning if it was too much."""
    (steal, most_steal), (others, most_others) = noise["steal"], noise["others"]
    median, low, high, least, most = (flops / 1e9 for flops in noise["product_flops"])
    text = (
        f"CPU time taken by the hypervisor: {steal:.1%} (at most {most_steal:.1%}); by other processes: {others:.1%} (at most"
        f" {most_others:.1%})\n"
        f"calibration product: {median:,.0f} GFLOP/s (quartiles {low:,.0f} to {high:,.0f}, all {least:,.0f} to {most:,.0f});"
        f" it changed by {noise['product_drift']:.1%} during a turn"
    )
    if steal + others > _QUIET:
        text += "\nwarning: the machine was not quiet. Repeat the measurement with nothing else running"
    return text


def row(name: str, figures: Mapping[str, Any]) -> str:
    """A peer's line of the table."""
    low, high = figures["quartiles"]
    rate = f"{figures['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})"
    ahead = ""
    if figures["ahead_by"] is not None:
        low, mean, high = figures["ahead_by"]
        ahead = f"{mean:.3f} ({low:.3f} to {high:.3f})"
    return (
        f"{name:16}{rate:>26}{ahead:>32}{figures['share_of_peak']:>13.1%}{figures['first_step_s']:>10.1f} s"
        f"{figures['peak_bytes'] / 2**20:>7,.0f} MiB{figures['loss_differs']:>17.1e}"
    )
