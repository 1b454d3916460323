"""Orchestration in a run's `train` section: a portfolio of strategies, and the controller that chooses between them."""

from typing import Literal

from jaxlm.interop.section import Section
from jaxlm.interop.translated import Translated

Mode = Literal["active", "monitor"]
_ENABLED, _MODE, _ADAGC = "orchestrator_enabled", "orchestrator_mode", "orchestrator_use_adagc"
_INITIAL, _SAFE = "orchestrator_initial_strategy", "orchestrator_safety_strategy"
_NOWCASTING = "orchestrator_use_nowcasting"
_WARMUP, _THRESHOLD = "orchestrator_adagc_warmup", "orchestrator_adagc_threshold"
_BASE_RATE, _FAIL_FAST = "orchestrator_portfolio_base_lr", "orchestrator_fail_fast"
_CONTROLLER = {
    "interval": ("orchestrator_decision_interval", 500),
    "horizon": ("orchestrator_eval_horizon", 100),
    "max_spikes": ("orchestrator_max_spikes_before_switch", 3),
    "safety.max_loss_increase": ("orchestrator_max_loss_increase", 1.5),
}
"""Keys of the controller -> those of caramba, with their defaults."""
_OF_STRATEGIES = ("optimizer", "beta1", "beta2", "grad_clip", "blockwise_grad_clip_norm")
"""Keys of a single optimizer of which each strategy has its own."""
_USUAL_BASE_RATE = 1e-4
_NOWCAST_WINDOW = 20
_NOWCAST = {"every": 100, "start": 200, "steps": 50}
_ADAGC_DECAY = 0.99
CLIPPED_TOGETHER = {
    "conservative_adamw": {"type": "adamw", "max_grad_norm": 1.0},
    "aggressive_adamw": {"type": "adamw", "lr_scale": 3.0, "max_grad_norm": 5.0},
    "spike_resistant": {"type": "adamw", "lr_scale": 0.3, "max_grad_norm": 0.5},
    "sgd_escape": {"type": "sgd", "swats": True, "nesterov": True, "max_grad_norm": 1.0},
}
"""The strategies of the guide (`optimizer.strategies: guide`) without the AdaGC of spike_resistant, which all have."""
_OF_THE_CODE = "lion_conservative"


def take_mode(train: Section) -> Mode | None:
    """What the orchestrator does; None if there is none. Then none of its keys is left."""
    enabled = train.choice(_ENABLED, (True, False), False)
    mode = train.choice(_MODE, ("active", "monitor", "disabled"))
    if enabled and mode != "disabled":
        return "monitor" if mode == "monitor" else "active"
    if mode is not None and not enabled:
        train.note(_MODE, f"no effect without {_ENABLED}: true")
    others = (_INITIAL, _SAFE, _NOWCASTING, _ADAGC, _WARMUP, _THRESHOLD, _BASE_RATE, _FAIL_FAST)
    for key in (*others, *(old for old, _ in _CONTROLLER.values())):
        train.ignore(key, f"no effect without {_ENABLED}: true" if not enabled else f"no effect with {_MODE}: disabled")
    return None


def put_orchestrator(train: Section, place: str, phase: str, mode: Mode, out: Translated) -> float:
    """Writes the optimizer, without its schedule and weight decay, and the controller.

    Args:
        place: what the paths of the run's own sections begin with: `phases.0.`, or nothing for the top level.

    Returns:
        What the learning rate is multiplied by.
    """
    optimizer, controller = f"{place}optimizer", f"{place or 'trainer.'}controllers.0"
    out.put(f"{optimizer}.type", "portfolio", train, _ENABLED)
    out.put(f"{optimizer}.telemetry", True, train, _ENABLED)
    out.put(f"{optimizer}.initial", _strategy(train, _INITIAL, "conservative_adamw"), train, _INITIAL)
    for key in _OF_STRATEGIES:
        if key in train:
            train.note(key, f"no effect with {_ENABLED}: each strategy has its own. Set optimizer.strategies")
        train.take(key)
    _put_adagc(train, optimizer, out)
    out.put(f"{controller}.type", "orchestrator", train, _ENABLED)
    out.put(f"{controller}.mode", mode, train, _MODE)
    out.put(f"{controller}.safety.strategy", _strategy(train, _SAFE, "spike_resistant"), train, _SAFE)
    for new, (old, default) in _CONTROLLER.items():
        out.put(f"{controller}.{new}", train.take(old, default), train, old)
    if train.choice(_NOWCASTING, (True, False), False):
        if phase == "blockwise":
            raise train.error(
                _NOWCASTING,
                "true given in a blockwise run, whose layers stop at different steps: their weights have no common trend."
                " Remove the key",
            )
        out.put(f"{optimizer}.nowcast", {"window": _NOWCAST_WINDOW}, train, _NOWCASTING)
        out.put(f"{controller}.nowcast", _NOWCAST, train, _NOWCASTING)
    if train.choice(_FAIL_FAST, (True, False), True) is False:
        raise train.error(
            _FAIL_FAST,
            "false given, which jaxlm cannot do: an error of the orchestrator ends the run, as any error does, and the next"
            f" start resumes it. Remove the key, or set {_ENABLED}: false to go on without the orchestrator",
        )
    if mode == "active":
        _check_held_out(train, phase, out)
    base = train.number(_BASE_RATE, _USUAL_BASE_RATE)
    if base <= 0:
        raise train.error(_BASE_RATE, f"{base} given, a number above 0 expected")
    return _USUAL_BASE_RATE / base


def _strategy(train: Section, key: str, default: str) -> str:
    name = train.choice(key, (*CLIPPED_TOGETHER, _OF_THE_CODE), default)
    if name == _OF_THE_CODE:
        train.note(
            key,
            f"the guide has no {name}. Set optimizer.strategies: caramba, which has the strategies of caramba's code",
        )
    return name


def _put_adagc(train: Section, optimizer: str, out: Translated) -> None:
    """Writes AdaGC for all strategies, if the run has it."""
    if not train.choice(_ADAGC, (True, False), False):
        for key in (_WARMUP, _THRESHOLD):
            train.ignore(
                key, f"no effect without {_ADAGC}: true. Of the strategies, spike_resistant alone has AdaGC then"
            )
        return
    out.put(f"{optimizer}.strategies", CLIPPED_TOGETHER, train, _ADAGC)
    out.put(f"{optimizer}.adagc.mode", "zscore", train, _ADAGC)
    out.put(f"{optimizer}.adagc.beta", _ADAGC_DECAY, train, _ADAGC)
    out.put(f"{optimizer}.adagc.threshold", train.take(_THRESHOLD, 3.0), train, _THRESHOLD)
    out.put(f"{optimizer}.adagc.warmup", train.take(_WARMUP, 100), train, _WARMUP)


def _check_held_out(train: Section, phase: str, out: Translated) -> None:
    """Says what is missing to compare strategies.

    Raises:
        ConfigError: the teacher's outputs come from a file that has the training data alone.
    """
    if not out.has("data.num_validation_sequences"):
        train.note(
            _ENABLED,
            "strategies are compared on held-out data, of which the manifest has none. Set defaults.data.val_frac (of a .npy"
            f" file), data.num_validation_sequences or data.validation_urls; or {_MODE}: monitor, which compares nothing",
        )
    if phase == "blockwise" and train.peek("cache_teacher_outputs") is True:
        raise train.error(
            "cache_teacher_outputs",
            f"true given together with {_ENABLED}, which compares strategies on held-out data, but the stored outputs are"
            f" those for the training data. Set it to false, or {_MODE}: monitor",
        )
