"""Where a run begins: its own newest checkpoint, another run's, another's weights, or nothing."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxlm.config.trainer import TrainerConfig
from jaxlm.core.errors import ConfigError
from jaxlm.core.runtime import main_first
from jaxlm.data.tokenizer.tokenizer import load_tokenizer
from jaxlm.engine.checkpoint.remote import is_url
from jaxlm.engine.checkpoint.resolve import resolve_checkpoints
from jaxlm.engine.checkpoint.restore import VerifiedCheckpoint, latest_complete, latest_valid, restore
from jaxlm.engine.checkpoint.store import Checkpoint
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState, place_state
from jaxlm.interop.hf.folder import load_model
from jaxlm.interop.hf.hub import local_folder
from jaxlm.interop.hf.model_section import hf_name
from jaxlm.models.base import LanguageModel
from jaxlm.run.adapters import check_adapters
from jaxlm.run.plan import Plan

Log = Callable[[str], None]


@dataclass(frozen=True)
class InitFrom:
    """What a run begins with.

    Attributes:
        state: the checkpoint that it goes on from, step, optimizer and data position included; None begins at step 0.
        is_own: whether that is the run's own.
        weights: the checkpoint whose model it begins with, at step 0; never beside a `state`.
    """

    state: VerifiedCheckpoint | None = None
    is_own: bool = True
    weights: VerifiedCheckpoint | None = None

    @property
    def resume_step(self) -> int | None:
        """Steps that this run itself has done, as far as it is kept; None where it is a new run."""
        return self.state.cursor.step if self.state and self.is_own else None

    def in_phase(self, phase: Phase) -> VerifiedCheckpoint | None:
        """The checkpoint to resume from, if it was saved in this phase."""
        return self.state if self.state and self.state.cursor.phase == phase.index else None

    def load_state(self, plan: Plan, phase: Phase, log: Log) -> RunState:
        """The whole state, in the phase that it stands in. Call it inside `plan.layout.use()`."""
        assert self.state is not None
        partial = plan.config.trainer.allow_partial_checkpoint
        like = plan.state_builder.abstract_state(phase)
        fresh = (
            (lambda: place_state(lambda: plan.state_builder.initial_state(phase), like, plan.layout))
            if partial
            else None
        )
        return restore(self.state, like, plan.layout, fresh=fresh, log=log)

    def load_weights(self, plan: Plan, log: Log) -> LanguageModel | None:
        """The model that the first phase is entered with, or None. Call it inside `plan.layout.use()`."""
        if self.weights is None:
            return _imported(plan, log)
        log(f"the model's weights are those of {self.weights.place}; steps, optimizer and data begin anew")
        partial = plan.config.trainer.allow_partial_checkpoint
        like = plan.state_builder.abstract_initial_model
        fresh = (lambda: place_state(plan.state_builder.initial_model, like, plan.layout)) if partial else None
        return restore(self.weights, like, plan.layout, prefix="model", fresh=fresh, log=log, cast=True)


def remaining_phases(plan: Plan, checkpoint: VerifiedCheckpoint | None) -> Sequence[Phase]:
    """The phases that are not complete at a checkpoint; all of them without one."""
    if checkpoint is None:
        return plan.phases
    current = plan.phases[checkpoint.cursor.phase]
    is_complete = checkpoint.cursor.step == current.end
    return plan.phases[current.index + is_complete :]


def _imported(plan: Plan, log: Log) -> LanguageModel | None:
    """The weights of Hugging Face that are configured, if any are."""
    name = hf_name(plan.config.initialize_from_hf, plan.data[0].tokenizer)
    if name is None:
        return None
    path = main_first(lambda: local_folder(name, "initialize_from_hf", weights=True))
    log(f"weights: {path}")
    abstract = plan.state_builder.abstract_initial_model
    return load_model(path, abstract, plan.config.model, plan.layout, rules=plan.config.hf_weight_names)


def check_init_from(plan: Plan) -> None:
    """Looks at what is there, and changes nothing of it; what lies behind a URL may be copied here for that.

    Raises:
        ConfigError: keys that contradict each other, or a checkpoint that must be there and is not.
    """
    trainer = plan.config.trainer
    if trainer.initialize_from is not None and trainer.initialize_from_state is not None:
        raise ConfigError(
            "trainer.initialize_from and initialize_from_state: one takes the model, the other all. Leave one of them out"
        )
    if trainer.initialize_from is not None and plan.config.initialize_from_hf:
        raise ConfigError(
            "trainer.initialize_from and initialize_from_hf: both name the first weights. Leave one of them out"
        )
    if trainer.load_checkpoint is False and trainer.load_checkpoint_path is not None:
        raise ConfigError("trainer.load_checkpoint: false given, and a load_checkpoint_path. Leave one of them out")
    own = main_first(plan.checkpoints.checkpoints)
    if trainer.load_checkpoint is False and own:
        raise ConfigError(
            f"trainer.load_checkpoint: false, but the run '{plan.run_id}' has checkpoints ({own[-1].place}), and a run that"
            " begins again would mix with them. Give it a trainer.id of its own, or move them away"
        )
    if not own:
        check_adapters(plan)
    elsewhere = trainer.load_checkpoint_path
    if trainer.load_checkpoint and not own and (elsewhere is None or not _at(elsewhere, trainer)):
        raise ConfigError(
            f"trainer.load_checkpoint: true, but there is no checkpoint at {elsewhere or plan.checkpoints.place}"
        )
    for name in ("initialize_from", "initialize_from_state"):
        path = getattr(trainer, name)
        if path is not None and not own and not _at(path, trainer):
            raise ConfigError(
                f"trainer.{name}: no checkpoint at {path}. Name one, a run's folder of them, or a folder of runs"
            )


def find_init_from(plan: Plan, log: Log) -> InitFrom:
    """What the run begins with. The run's own checkpoints come first, whatever else is named.

    Raises:
        NothingUsableError: there are checkpoints, and none of them is whole.
    """
    trainer = plan.config.trainer
    own = latest_valid(plan.checkpoints, log)
    if own is not None:
        return InitFrom(own)
    elsewhere = trainer.load_checkpoint_path
    if elsewhere is not None and (found := _at(elsewhere, trainer)):
        return InitFrom(latest_complete(found, elsewhere, log), is_own=False)
    if elsewhere is not None:
        log(f"trainer.load_checkpoint_path: no checkpoint at {elsewhere}; the run begins without it")
    if trainer.initialize_from_state is not None:
        return InitFrom(_newest(trainer.initialize_from_state, trainer, log), is_own=False)
    if trainer.initialize_from is not None:
        return InitFrom(weights=_newest(trainer.initialize_from, trainer, log))
    return InitFrom()


def check_tokenizer(init_from: InitFrom, fingerprint: str, log: Log) -> None:
    """Says where a checkpoint of another run was trained with other tokens."""
    found = init_from.weights or (None if init_from.is_own else init_from.state)
    if found is None:
        return
    with found.checkpoint.local("run/tokenizer") as folder:
        theirs = load_tokenizer(str(folder)).fingerprint
    if theirs != fingerprint:
        log(f"warning: {found.place} was trained with another tokenizer: its embeddings mean other tokens")


def _newest(path: str, trainer: TrainerConfig, log: Log) -> VerifiedCheckpoint:
    return latest_complete(_at(path, trainer), path, log)


def _at(path: str, trainer: TrainerConfig) -> Sequence[Checkpoint]:
    """Checkpoints where a key points, the newest last."""
    find = functools.partial(resolve_checkpoints, path, Path(trainer.checkpointer.staging_dir))
    return main_first(find) if is_url(path) else find()
