"""config.json files in which several places describe one thing, as transformers and jaxlm read them."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.interop.hf.family import config_to_json, family_of_config
from jaxlm.interop.hf.folder import PretrainedModel, open_folder
from tests.interop.cases import CASES, FIRST, GPT2, LLAMA, MPT, NEOX, NO_DROPOUT, VOCAB, tokens


def content_of(kind: str, **more: Any) -> dict[str, Any]:
    """A small config.json of a family, with the first case's own keys but plain rotary embeddings."""
    base = {"gpt2": GPT2 | NO_DROPOUT, "gpt_neox": NEOX, "mpt": MPT}.get(kind, LLAMA)
    options = {key: value for key, value in CASES[FIRST[kind]][1].items() if key != "rope_parameters"}
    return copy.deepcopy({"model_type": kind, "vocab_size": VOCAB, "pad_token_id": None, **base, **options, **more})


def logits_of_transformers(path: Path, content: dict[str, Any], *, save: bool = False) -> np.ndarray:
    """The logits of a model that transformers builds from a config.json, with weights that are the same at each call.

    Args:
        save: write them to the folder.
    """
    import torch
    import transformers

    (path / "config.json").write_text(json.dumps(content))
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        if save:
            model.save_pretrained(path)
        return model.eval()(torch.tensor(tokens())).logits.numpy()


def opened(path: Path, content: dict[str, Any]) -> PretrainedModel:
    """The folder with this config.json alone."""
    (path / "config.json").write_text(json.dumps(content))
    return open_folder(path)


def as_read(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The config.json that jaxlm writes for what it has read in another."""
    folder = opened(path, content)
    keys = config_to_json(family_of_config(folder.config), folder.config)
    return {"pad_token_id": None, **keys, "vocab_size": folder.vocab_size}
