"""Exports a model as a folder for transformers, for `jaxlm.convert` and during training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxlm.core.publish import Location, PublishError, child_of, is_taken
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.base import LanguageModel
from jaxlm.run.plan import Plan
from jaxlm.surgery.base import merge_surgeries


def export_model(folder: Location, model: LanguageModel, plan: Plan, tokenizer: Tokenizer, dtype: Any) -> None:
    """Writes a complete new folder with configuration, weights and tokenizer. All processes must call this.

    Args:
        model: a plain model, with all surgeries merged.
    """
    config = plan.config.model
    files = tokenizer.files(max_length=config.seq_len)
    save_folder(folder, model, config, plan.layout, dtype=dtype, files=files, special_ids=tokenizer.special_ids)


@dataclass(frozen=True)
class ExportHook:
    """Exports the model to `folder/step-N` every `every_steps` steps and after the last step of the phase."""

    folder: Location
    every_steps: int
    phase: Phase
    plan: Plan
    tokenizer: Tokenizer
    dtype: Any
    log: Callable[[str], None]

    def due(self, step: int) -> bool:
        return step % self.every_steps == 0 or step == self.phase.end

    def run(self, step: int, state: RunState) -> None:
        """Exports the model, unless this step's folder exists: a resumed run may repeat steps.

        A failed upload does not end the run.
        """
        folder = child_of(self.folder, f"step-{step}")
        if is_taken(folder, "config.json"):
            return
        model = merge_surgeries(state.model, self.plan.state_builder.surgeries_until(self.phase))
        try:
            export_model(folder, model, self.plan, self.tokenizer, self.dtype)
        except PublishError as error:
            self.log(f"warning: step {step}: not exported: {error}. To export it later, run jaxlm convert")
        else:
            self.log(f"step {step}: exported to {folder}")
