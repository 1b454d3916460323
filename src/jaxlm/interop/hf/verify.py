"""Verifies an exported folder: compares its logits and greedy tokens with those of the original model."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.tensor_files import open_tensors
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig
from jaxlm.models.inference.generate import generate

_PROMPT_LENGTH, _NUM_NEW_TOKENS = 16, 32
_RELATIVE_TOLERANCE = 1e-3  # of the largest logit; both sides compute in float32, in different orders


def verify_folder(folder: Path, model: LanguageModel, config: ModelConfig, layout: Layout) -> str:
    """Loads a folder, with transformers if it is installed, and compares it with `model`. Both compute in float32.

    Args:
        model: the exported model. It is rounded to the dtype of the files first.

    Returns:
        A summary of the comparison.

    Raises:
        ConfigError: the logits or greedy tokens differ.
    """
    dtype = next(iter(open_tensors(folder).tensors.values())).dtype
    rounded = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), tree))(model)
    length = min(config.seq_len, _PROMPT_LENGTH + _NUM_NEW_TOKENS)
    ids = np.random.default_rng(0).integers(0, model.Vocab.size, size=(layout.mesh.size, length))
    ours = np.asarray(_logits(rounded, ids))
    new = max(0, min(_NUM_NEW_TOKENS, length - 1))
    prompt = ids[:1, : length - new].tolist()
    greedy = generate(rounded, prompt, max_new_tokens=new, temperature=0.0)[0]
    reader, logits, tokens = _reader(folder, config, layout)
    theirs = logits(ids)
    difference = float(np.abs(ours - theirs).max())
    if not difference <= _RELATIVE_TOLERANCE * float(np.abs(ours).max()):
        raise ConfigError(
            f"{folder}: loaded with {reader}, logits differ by up to {difference:.3g} from the checkpoint"
        )
    reader_tokens = tokens(prompt, new)
    if reader_tokens != greedy:
        raise ConfigError(f"{folder}: {reader} generates {reader_tokens}, the checkpoint generates {greedy}")
    return f"verified with {reader}: logits within {difference:.1e}, the same {new} greedy tokens"


@jax.jit
def _model_logits(model: LanguageModel, inputs: Inputs) -> jax.Array:
    return model.logits(model.hidden(inputs).final).array


def _logits(model: LanguageModel, ids: np.ndarray) -> jax.Array:
    axes = (Axis(BATCH, ids.shape[0]), Axis(POSITION, ids.shape[1]))
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return _model_logits(
        model, Inputs(*(hax.named(jnp.asarray(a, jnp.int32), axes) for a in (ids, positions, np.ones_like(ids))))
    )


def _reader(folder: Path, config: ModelConfig, layout: Layout) -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    """The library that loads the folder: (name, ids -> logits, (prompt, count) -> greedy tokens)."""
    if importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("torch") is not None:
        return _transformers(folder)
    vocab = Axis("vocab", open_folder(folder).vocab_size)
    abstract = jax.eval_shape(lambda: config.build(vocab, key=jax.random.key(0)))
    model = load_model(folder, abstract, config, layout)

    def tokens(prompt: list[list[int]], count: int) -> list[int]:
        return generate(model, prompt, max_new_tokens=count, temperature=0.0)[0]

    return "jaxlm (transformers is not installed)", lambda ids: np.asarray(_logits(model, ids)), tokens


def _transformers(folder: Path) -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    import torch  # pyright: ignore[reportMissingImports] - extras
    import transformers  # pyright: ignore[reportMissingImports]

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(ids)).logits.numpy()

    def tokens(prompt: list[list[int]], count: int) -> list[int]:
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            return model.generate(torch.tensor(prompt), **options)[0, len(prompt[0]) :].tolist()

    return f"transformers {transformers.__version__}", logits, tokens
