"""Verifies an exported folder: compares its logits and greedy tokens with those of the original model."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from jaxlm.core import tree
from jaxlm.core.axes import BATCH, POSITION
from jaxlm.core.errors import ConfigError
from jaxlm.core.safe_io import read_json_object
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.classifier import is_reward_model, read_score
from jaxlm.interop.hf.folder import load_model, open_folder
from jaxlm.interop.hf.stored_formats import open_weights
from jaxlm.interop.hf.tensor_files import most_common_dtype
from jaxlm.interop.hf.weights import expanded
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig, reward_head
from jaxlm.models.inference.generate import generate

_ALONE = "jaxlm (transformers is not installed)"
_PROMPT_LENGTH, _NUM_NEW_TOKENS = 16, 32
_RELATIVE_TOLERANCE = 1e-3  # of the largest logit; both sides compute in float32, in different orders


def verify_folder(folder: Path, model: LanguageModel, config: ModelConfig, layout: Layout) -> str:
    """Loads a folder, with transformers if it is installed, and compares it with `model`. Both compute in float32.

    Args:
        model: the exported model. It is rounded to the dtypes of the files first.

    Returns:
        A summary of the comparison.

    Raises:
        ConfigError: the logits differ, or the greedy tokens of a causal model; of a reward model, the rewards.
    """
    dtype = most_common_dtype(open_weights(folder))
    others = _others(folder, model, config, dtype)
    rounded = jax.jit(functools.partial(_rounded, dtype=dtype, others=others))(model)
    if is_reward_model(model):
        return _verify_scores(folder, rounded, config.seq_len, layout)
    length = min(config.seq_len, _PROMPT_LENGTH + _NUM_NEW_TOKENS)
    ids = np.random.default_rng(0).integers(0, model.Vocab.size, size=(layout.mesh.size, length))
    ours = np.asarray(_logits(rounded, ids))
    reader, logits, tokens = _reader(folder, config, layout)
    agreed = _agreed(ours, logits(ids), "logits", folder, reader)
    if not model.is_causal:  # and does not generate token by token
        return agreed
    new = max(0, min(_NUM_NEW_TOKENS, length - 1))
    prompt = ids[:1, : length - new].tolist()
    greedy, reader_tokens = generate(rounded, prompt, max_new_tokens=new, temperature=0.0)[0], tokens(prompt, new)
    if reader_tokens != greedy:
        raise ConfigError(f"{folder}: {reader} generates {reader_tokens}, the checkpoint generates {greedy}")
    return f"{agreed}, the same {new} greedy tokens"


def _others(
    folder: Path, model: LanguageModel, config: ModelConfig, dtype: Any
) -> dict[str, list[tuple[Any, np.dtype]]]:
    """Path of a parameter -> the indices of its tensors in the folder that have another dtype, with that dtype."""
    leaves, form = dict(tree.leaves(model)), open_folder(folder).form
    assert form is not None, "the folder has a config.json"
    source, found = form.tensors(open_weights(folder), config), dict[str, list[tuple[Any, np.dtype]]]()
    table = form.table(config, form.layout(source, config, leaves))
    for name, tensor, numbers in expanded(table, lambda tensor: tensor.sizes(leaves)):
        info, number = source.tensors.get(name), dict(zip(tensor.stacked, numbers, strict=True))
        if info is not None and info.dtype != dtype:
            for part in tensor.parts:
                index = tuple(number.get(axis.name, slice(None)) for axis in leaves[part.path].axes)
                found.setdefault(part.path, []).append((index, info.dtype))
    return found


def _rounded(model: LanguageModel, dtype: Any, others: Mapping[str, list[tuple[Any, np.dtype]]]) -> LanguageModel:
    """In float32, with the precision of the files. Integers stay as they are. Args: others: as of `_others`."""

    def rounded(path: str, x: Any) -> Any:
        if not tree.is_inexact(x):
            return x
        array = x.array.astype(dtype).astype(jnp.float32)
        for index, other in others.get(path, ()):
            array = array.at[index].set(x.array[index].astype(other).astype(jnp.float32))
        return hax.NamedArray(array, x.axes)

    return tree.map_leaves(rounded, model)


def _verify_scores(folder: Path, model: LanguageModel, seq_len: int, layout: Layout) -> str:
    """Compares the rewards of the beginnings of a random sequence."""
    padding = read_json_object(folder / "config.json").get("pad_token_id")
    known = np.setdiff1d(np.arange(model.Vocab.size), [-1 if padding is None else padding])
    ids = np.random.default_rng(0).choice(known, min(seq_len, _PROMPT_LENGTH))
    reader, rewards = _classifier(folder, layout)
    head = jax.jit(reward_head)(model)
    return _agreed(_scores(model, head.array, ids, layout), rewards(ids), "rewards", folder, reader)


def _agreed(ours: np.ndarray, theirs: np.ndarray, name: str, folder: Path, reader: str) -> str:
    difference = float(np.abs(ours - theirs).max())
    if not difference <= _RELATIVE_TOLERANCE * float(np.abs(ours).max()):
        raise ConfigError(
            f"{folder}: loaded with {reader}, {name} differ by up to {difference:.3g} from the checkpoint"
        )
    return f"verified with {reader}: {name} within {difference:.1e}"


def _scores(model: LanguageModel, head: Any, ids: np.ndarray, layout: Layout) -> np.ndarray:
    """The reward after each token of a sequence. Args: head: [embed]."""
    hidden = jax.jit(lambda model, inputs: model.hidden(inputs).final.array)
    return np.asarray(hidden(model, _inputs(np.array([ids] * layout.mesh.size))))[0] @ np.asarray(head)


def _classifier(folder: Path, layout: Layout) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """The library that loads the folder of a reward model, and the reward after each token of a sequence."""
    if _has_transformers():
        import torch  # pyright: ignore[reportMissingImports] - extras
        import transformers  # pyright: ignore[reportMissingImports]

        classes: Any = transformers.AutoModelForSequenceClassification
        loaded = classes.from_pretrained(folder, dtype=torch.float32).eval()

        def of_beginnings(ids: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return np.array(
                    [float(loaded(torch.tensor(ids[None, :end])).logits[0, 0]) for end in range(1, len(ids) + 1)]
                )

        return f"transformers {transformers.__version__}", of_beginnings
    base, head = _loaded(folder, open_folder(folder).config, layout), read_score(folder, "--output_dir")
    return _ALONE, lambda ids: _scores(base, head, ids, layout)


def _loaded(folder: Path, config: ModelConfig, layout: Layout) -> LanguageModel:
    vocab = Axis("vocab", open_folder(folder).vocab_size)
    abstract = jax.eval_shape(lambda: config.build(vocab, key=jax.random.key(0)))
    return load_model(folder, abstract, config, layout)


@jax.jit
def _model_logits(model: LanguageModel, inputs: Inputs) -> jax.Array:
    return model.logits(model.hidden(inputs).final).array


def _logits(model: LanguageModel, ids: np.ndarray) -> jax.Array:
    return _model_logits(model, _inputs(ids))


def _inputs(ids: np.ndarray) -> Inputs:
    """Sequences without padding. Args: ids: [batch, position]."""
    axes = (Axis(BATCH, ids.shape[0]), Axis(POSITION, ids.shape[1]))
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return Inputs(*(hax.named(jnp.asarray(a, jnp.int32), axes) for a in (ids, positions, np.ones_like(ids))))


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("torch") is not None


def _reader(folder: Path, config: ModelConfig, layout: Layout) -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    """The library that loads the folder: (name, ids -> logits, (prompt, count) -> greedy tokens)."""
    if _has_transformers():
        return _transformers(folder)
    model = _loaded(folder, config, layout)

    def tokens(prompt: list[list[int]], count: int) -> list[int]:
        return generate(model, prompt, max_new_tokens=count, temperature=0.0)[0]

    return _ALONE, lambda ids: np.asarray(_logits(model, ids)), tokens


def _transformers(folder: Path) -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    import torch  # pyright: ignore[reportMissingImports] - extras
    import transformers  # pyright: ignore[reportMissingImports]

    (name,) = read_json_object(folder / "config.json")["architectures"]
    classes: Any = getattr(transformers, name, transformers.AutoModelForCausalLM)  # code in the folder is ours
    model = classes.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()

    def logits(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(ids)).logits.numpy()

    def tokens(prompt: list[list[int]], count: int) -> list[int]:
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.no_grad():
            return model.generate(torch.tensor(prompt), **options)[0, len(prompt[0]) :].tolist()

    return f"transformers {transformers.__version__}", logits, tokens
