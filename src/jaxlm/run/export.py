"""A trained model as a folder for transformers: at the end by `jaxlm.convert`, and while training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.core.atomic_io import is_taken
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.engine.phases import Phase
from jaxlm.engine.state import RunState
from jaxlm.interop.hf.folder import save_folder
from jaxlm.models.base import LanguageModel
from jaxlm.run.adapters import without_adapters
from jaxlm.run.plan import Plan


def export_model(folder: Path, model: LanguageModel, plan: Plan, tokenizer: Tokenizer, dtype: Any) -> None:
    """Writes a complete folder: configuration, weights, tokenizer. Every process calls this.

    Raises:
        ConfigError: the model has no counterpart there, or the folder is there already.
    """
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    merged, config = without_adapters(model), plan.config.model
    files = tokenizer.files(max_length=config.seq_len)
    save_folder(folder, merged, config, plan.layout, dtype=dtype, files=files, special_ids=special)


@dataclass(frozen=True)
class ExportHook:
    """Writes the model every so many steps, and after the last step of the phase; it looks and changes nothing.

    Attributes:
        folder: gets a folder `step-N` each time.
        every_steps: so many; the end of the phase always counts.
        phase: whose end that is.
    """

    folder: Path
    every_steps: int
    phase: Phase
    plan: Plan
    tokenizer: Tokenizer
    dtype: Any
    log: Callable[[str], None]

    def due(self, step: int) -> bool:
        """Every so many steps, and at the end."""
        return step % self.every_steps == 0 or step == self.phase.end

    def run(self, step: int, state: RunState) -> None:
        """Writes, unless that step's folder is there: a run that goes on may pass it again."""
        folder = self.folder / f"step-{step}"
        if not is_taken(folder):
            export_model(folder, state.model, self.plan, self.tokenizer, self.dtype)
            self.log(f"step {step}: exported to {folder}")
