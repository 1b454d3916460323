"""nanochat's checkpoints, in both directions: `model_005000.pt` with `meta_005000.json` beside it.

The files do not say what the code does that wrote them. Of the two revisions that `systems/nanochat/model.py` covers, the
one with smear has 24 inputs to the smear gate and 12 to the gates of value embeddings, the other no smear and 32.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.core.errors import ConfigError
from jaxlm.core.hashing import note_file
from jaxlm.core.install import install_command
from jaxlm.core.publish import check_unused, publish_folder
from jaxlm.core.runtime import is_main_process
from jaxlm.core.safe_io import read_json_object
from jaxlm.core.sharding import Layout
from jaxlm.interop.hf.folder import PretrainedModel, ReadOptions
from jaxlm.interop.hf.load import Change, load_weights
from jaxlm.interop.hf.tensor_files import NamedTensors, renamed
from jaxlm.interop.hf.weights import BLOCK, HEADS, Tensor, TensorWriter, single
from jaxlm.interop.pretrained import WeightFormat
from jaxlm.interop.torch.torch_file import TorchFile
from jaxlm.models.base import LanguageModel, ModelConfig
from jaxlm.reading.choices import choice
from jaxlm.systems.nanochat.body import has_value_embedding
from jaxlm.systems.nanochat.layers import FEBRUARY_2026, JULY_2026
from jaxlm.systems.nanochat.lookup import LookupConfig
from jaxlm.systems.nanochat.model import NanoConfig, num_lookup_entries, padded_vocab_size

_SIZES = {
    "sequence_len": "seq_len",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_kv_head": "num_kv_heads",
    "n_embd": "hidden_dim",
}
"""Keys of `model_config` and our fields."""
_FIXED = ("mlp_scale", "final_soft_cap", *(name for name in FEBRUARY_2026 if name != "backout"))
"""The fields whose value is in nanochat's code. What is missing matters only to an initial model, or to rounding."""
_COMPUTED: dict[str, Any] = {"key_norm": False, "score_scale": 1.0}
_LOOKUP: dict[str, Any] = {**_COMPUTED, "allocation": "nanochat", "sample_tokens": 204_800}
"""The keys of lookup layers whose value is in nanochat's code. Those in `_COMPUTED` matter to a trained model."""
_MODEL = re.compile(r"model_(\d+)\.pt")
_VOCAB_MULTIPLE = 64
_LAYER = "transformer.h.{layer}."


@choice(WeightFormat, "nanochat")
class NanochatFormat(WeightFormat):
    """nanochat's `model_STEP.pt` with `meta_STEP.json`."""

    def find(self, path: Path) -> Path | None:
        return model_file(path)

    def open(self, file: Path) -> PretrainedModel:
        return PretrainedModel(*read_nanochat_config(file))

    def check_vocabulary(self, file: Path, num_tokens: int) -> None:
        check_vocabulary(file, num_tokens)

    def load(
        self, file: Path, abstract: LanguageModel, config: ModelConfig, layout: Layout, options: ReadOptions
    ) -> LanguageModel:
        return load_nanochat(file, abstract, config, layout, options.changes)


def model_file(path: Path) -> Path | None:
    """nanochat's weights file at a path: the file itself, or the newest in a folder. None if there is none."""
    if _is_model(path):
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = filter(_is_model, path.glob("model_*.pt"))
    return max(files, key=lambda file: _MODEL.fullmatch(file.name)[1].zfill(12), default=None)  # pyright: ignore[reportOptionalSubscript]


def _is_model(path: Path) -> bool:
    return _MODEL.fullmatch(path.name) is not None and _meta(path).is_file()


def _meta(file: Path) -> Path:
    return file.with_name(file.name.replace("model_", "meta_")).with_suffix(".json")


def read_nanochat_config(file: Path) -> tuple[NanoConfig, int]:
    """Reads the model config and the vocabulary size of a weights file.

    Raises:
        ConfigError: the model is of another revision, or the files are damaged.
    """
    meta = _meta(file)
    note_file(meta)
    model_config = read_json_object(meta).get("model_config")
    required = ("vocab_size", *_SIZES)
    if not isinstance(model_config, dict) or any(type(model_config.get(key)) is not int for key in required):
        raise ConfigError(
            f"{meta}: model_config with the integers {', '.join(required)} expected, {model_config!r} found"
        )
    lookup = _lookup_of(model_config, meta)
    source = _tensors_of(file)
    gates = [info.shape for name, info in source.tensors.items() if name.endswith("attn.ve_gate.weight")]
    channels = {shape[-1] for shape in gates if shape}
    revisions = (FEBRUARY_2026, JULY_2026)
    fields = next((fields for fields in revisions if channels == {fields["value_gate_channels"]}), None)
    if fields is None or ("smear_gate.weight" in source.tensors) != bool(fields["smear_channels"]):
        raise ConfigError(
            f"{file}: its value embeddings have gates with {sorted(channels) or 'no'} inputs, and"
            f" {'a' if 'smear_gate.weight' in source.tensors else 'no'} smear gate. Supported: nanochat of February 2026 (32"
            " inputs, no smear gate) and of July 2026 (12 inputs, a smear gate)"
        )
    sizes = {ours: model_config[theirs] for theirs, ours in _SIZES.items()}
    pattern = str(model_config.get("window_pattern", "L")).upper()
    config = NanoConfig(**sizes, **fields, window_pattern=pattern, lookup=lookup)
    config.check()
    return config, model_config["vocab_size"]


def _lookup_of(model_config: Mapping[str, Any], meta: Path) -> LookupConfig | None:
    text = str(model_config.get("l3_after_layers") or "")
    if not text:
        return None
    after, numbers = text.split(","), {name: model_config.get(f"l3_{name}") for name in ("n_emb", "d_up", "k_max")}
    sizes = {name: value for name, value in numbers.items() if type(value) is int and value >= 0}
    if not all(part.strip().isdecimal() for part in after) or len(sizes) < len(numbers) or not sizes["n_emb"]:
        raise ConfigError(
            f"{meta}: numbers of layers in l3_after_layers, such as '4,16', and integers in l3_n_emb, l3_d_up and l3_k_max"
            f" expected, '{text}' and {numbers} found"
        )
    return LookupConfig(
        layers=[int(part) for part in after],
        num_entries=sizes["n_emb"],
        mlp_dim=sizes["d_up"] or None,
        max_entries=max(1, sizes["k_max"]),
        tied=bool(model_config.get("l3_tie_kv", True)),
        **_LOOKUP,
    )


def load_nanochat(
    file: Path,
    abstract: LanguageModel,
    config: ModelConfig,
    layout: Layout,
    changes: Mapping[str, Change] | None = None,
) -> LanguageModel:
    """Loads the weights of a file into a model with the shapes and dtypes of `abstract`, sharded by `layout`.

    The rows that pad the vocabulary in the file are not read: no token stands for them.

    Args:
        changes: path of a leaf -> what is made of it.

    Raises:
        ConfigError: the weights do not fit the model; lists all tensors that are missing or do not fit.
    """
    if type(config) is not NanoConfig:
        raise ConfigError(
            f"model.type: {type(config).__name__} given, but {file} contains a model of nanochat. Set model.type: nano, or"
            " use_hf_model_config: true"
        )
    check_vocabulary(file, abstract.Vocab.size)
    return load_weights(abstract, weight_table(config), _tensors_of(file), layout, where=str(file), changes=changes)


def check_vocabulary(file: Path, num_tokens: int) -> None:
    """Raises `ConfigError` if the model of a weights file has another vocabulary than a tokenizer of this size."""
    _, vocab_size = read_nanochat_config(file)
    if vocab_size != num_tokens:
        raise ConfigError(
            f"{file}: a vocabulary of {vocab_size} tokens in {_meta(file).name}, but the tokenizer has {num_tokens}. Set"
            " data.tokenizer to the one that the model was trained with"
        )


def _tensors_of(file: Path) -> NamedTensors:
    """The tensors of a file, without the prefix that torch.compile puts before their names."""
    return renamed(TorchFile(file), {r"(?:_orig_mod\.)?(.+)": r"\1"})


def weight_table(config: NanoConfig) -> list[Tensor]:
    """nanochat's tensors and the parameters in them."""
    return list(_tensors(config))


def _tensors(config: NanoConfig) -> Iterator[Tensor]:
    yield single("transformer.wte.weight", "tokens.weight", "vocab | embed")
    yield single("lm_head.weight", "head.weight", "vocab | embed")
    for name in ("resid_lambdas", "x0_lambdas"):
        yield single(name, f"body.{name}", "layers")
    if config.smear_channels:
        yield single("smear_gate.weight", "smear_gate", " | smear_channels")
        yield single("smear_lambda", "smear_lambda", "")
    if config.backout is not None:
        yield single("backout_lambda", "backout_lambda", "")
    for theirs, ours in (("c_q", "q_proj"), ("c_k", "k_proj"), ("c_v", "v_proj")):
        yield single(f"{_LAYER}attn.{theirs}.weight", f"{BLOCK}attn.{ours}.weight", f"{HEADS[ours]} | embed")
    yield single(f"{_LAYER}attn.c_proj.weight", f"{BLOCK}attn.o_proj.weight", "embed | heads head_size")
    yield single(f"{_LAYER}mlp.c_fc.weight", f"{BLOCK}mlp.up_proj.weight", "mlp | embed")
    yield single(f"{_LAYER}mlp.c_proj.weight", f"{BLOCK}mlp.down_proj.weight", "embed | mlp")
    first = next(number for number in range(2) if has_value_embedding(number, config.num_layers))
    for theirs, ours, layout in (
        ("value_embeds.{value_layer}.weight", "body.value_embedding", "vocab | value_embed"),
        ("transformer.h.{value_layer}.attn.ve_gate.weight", "body.value_gates.weight", "kv_heads | gate_channels"),
    ):
        yield dataclasses.replace(single(theirs, ours, layout), numbers=tuple(range(first, config.num_layers, 2)))
    if config.lookup is not None:
        for number, layer in enumerate(sorted(config.lookup.layers)):
            yield from _lookup_tensors(f"l3_layers.{layer}.", f"body.lookups.{number}.", tied=config.lookup.tied)


def _lookup_tensors(theirs: str, ours: str, *, tied: bool) -> Iterator[Tensor]:
    table = "lookup_entries | embed"
    yield single(f"{theirs}{'kv' if tied else 'k'}_weight", f"{ours}keys_embedding", table)
    if not tied:
        yield single(f"{theirs}v_weight", f"{ours}values_embedding", table)
    yield single(f"{theirs}w_up.weight", f"{ours}up_proj.weight", "lookup_mlp | embed")
    yield single(f"{theirs}w_mix.weight", f"{ours}mix_proj.weight", "embed | lookup_mix")
    yield single(f"{theirs}bounds", f"{ours}bounds", "lookup_bounds")


def save_nanochat(folder: Path, model: LanguageModel, config: ModelConfig, layout: Layout, *, step: int) -> None:
    """Writes a model in the format that nanochat reads, in float32. Every process must call this; process 0 writes.

    Args:
        model: a model of `config`, without adapters.
        step: number of steps that the model was trained for.

    Raises:
        ConfigError: it is not a model of nanochat, its code cannot represent it, or torch is not installed.
    """
    if type(config) is not NanoConfig:
        raise ConfigError(f"model.type: {type(config).__name__} given, but nanochat has only models of type nano")
    described = _model_config(config, model.Vocab.size)
    try:
        import torch  # pyright: ignore[reportMissingImports] - the extra `torch`
    except ImportError as error:
        raise ConfigError(
            f"writing nanochat's files needs torch, which is not installed. Run: {install_command('torch')}"
        ) from error
    name, meta = f"model_{step:06d}.pt", f"meta_{step:06d}.json"
    check_unused(folder, meta)
    writer = TensorWriter(model, weight_table(config), layout, lambda *_: np.dtype(np.float32))
    if not is_main_process():
        return writer.join_others()
    rows = padded_vocab_size(dataclasses.replace(config, pad_vocab_to_multiple_of=_VOCAB_MULTIPLE), model.Vocab.size)
    names = list(writer.infos)
    state = {
        name: torch.tensor(_as_theirs(array, model.Vocab.size, rows, is_table=name.startswith(_TABLES)))
        for name, array in zip(names, writer.arrays(names), strict=True)
    }
    with publish_folder(folder, meta) as unfinished:
        torch.save(state, unfinished / name)
        (unfinished / meta).write_text(json.dumps({"step": step, "model_config": described}, indent=2) + "\n")
    return None


_TABLES = ("transformer.wte.", "lm_head.", "value_embeds.")


def _as_theirs(array: np.ndarray, size: int, rows: int, *, is_table: bool) -> np.ndarray:
    """A table with rows of zeros for the padding of the vocabulary; integers in 64 bits; anything else unchanged."""
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64)
    return np.pad(array, ((0, rows - size), (0, 0))) if is_table else array


def _model_config(config: NanoConfig, vocab_size: int) -> Mapping[str, Any]:
    """nanochat's `model_config`. Raises `ConfigError` for what its code cannot compute."""
    theirs = NanoConfig(**(JULY_2026 if config.smear_channels else FEBRUARY_2026))
    wrong = [
        f"model.{name}: {getattr(config, name)} given, {getattr(theirs, name)} expected"
        for name in _FIXED
        if getattr(config, name) != getattr(theirs, name)
    ]
    if (config.backout is None) != (theirs.backout is None):
        wrong.append(f"model.backout: {config.backout} given, {theirs.backout} expected")
    if config.lookup is not None:
        wrong += [
            f"model.lookup.{name}: {actual} given, {value} expected"
            for name, value in _COMPUTED.items()
            if (actual := getattr(config.lookup, name)) != value
        ]
        if config.smear_channels:
            wrong.append("model.lookup: given with smear, but nanochat had no lookup layers any more when it got smear")
    if wrong:
        raise ConfigError("nanochat's code cannot compute this model:\n" + "\n".join(f"  {line}" for line in wrong))
    sizes = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    sizes["n_kv_head"] = config.KVHeads.size
    described = {**sizes, "vocab_size": vocab_size, "window_pattern": config.window_pattern}
    return described if config.lookup is None else described | _described_lookup(config, config.lookup, vocab_size)


def _described_lookup(config: NanoConfig, lookup: LookupConfig, vocab_size: int) -> dict[str, Any]:
    num_entries = num_lookup_entries(config, vocab_size)
    return {
        "l3_after_layers": ",".join(map(str, sorted(lookup.layers))),
        "l3_n_emb": num_entries,
        "l3_d_up": lookup.mlp_dim or 0,
        "l3_k_max": lookup.most_entries(num_entries, vocab_size),
        "l3_tie_kv": lookup.tied,
    }
