"""The folder that a model was made from, as far as exports need it.

A run reads it once, as it starts, and each of its checkpoints has this description. The tensors that exports copy stay in
the folder: the description has their digests, so that a copy has the bytes that the run started with.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.publish import PublishError
from jaxlm.core.safe_io import read_bytes, sha256
from jaxlm.interop.hf.family import config_from_json, has_mtp, with_mtp_of
from jaxlm.interop.hf.form import Form, form_of_json
from jaxlm.interop.hf.hub import local_folder, repository_of
from jaxlm.interop.hf.load import differing_head, embedding_names
from jaxlm.interop.hf.safetensors_file import TensorInfo
from jaxlm.interop.hf.stored_formats import StoredView, open_weights
from jaxlm.interop.hf.tensor_files import NamedTensors, Region, TensorSource, most_common_dtype
from jaxlm.interop.hf.text_part import AS_IN_TABLE, IN_TRANSFORMERS, Modules, Names, without_sections
from jaxlm.interop.hf.weights import expanded
from jaxlm.models.base import LanguageModel, ModelConfig, as_family, vocab_axis

Json = dict[str, Any]
TEXT_ONLY = "To write the text model alone, set hf_save_parts: text (jaxlm convert: --parts text)"
_RESTORE = f"Restore it. {TEXT_ONLY}"
_MTP = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""Keys of config.json with the number of layers that predict further tokens."""
_OF_PROCESSORS = ("*processor_config.json", "chat_template.json", "SYSTEM_PROMPT.txt", "tekken.json")
_COMMITS = "snapshots"  # folder of the Hub's client, with a folder for each commit


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that exports copy.

    Attributes:
        dtype: name of the dtype.
        sha256: of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class SourceFolder:
    """The folder that a model was made from.

    Attributes:
        config: its config.json; empty for random weights. The others then are empty too.
        location: path, or Hub `name` or `name@revision`.
        names: how the names of its tensors begin.
        layout: number of the table of weights that fits its tensors.
        untied: whether its weights have a head of their own.
        embedding: the table's names of the tensors that are its token embedding and its head, if they are one.
        dtype: of most of its tensors.
        dtypes: names of the text model's tensors with another dtype -> the dtype.
        kept: name -> a tensor that exports copy.
        copies: those of `Family.copies` that it has, if the model has such a layer.
        files: name -> SHA-256 of a file that exports copy.
        stored: the table's names of the tensors that it has in a stored form.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    location: str = ""
    names: Names = AS_IN_TABLE
    layout: int = 0
    untied: bool = False
    embedding: tuple[str, ...] = ()
    dtype: str = ""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, KeptTensor] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stored: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path, location: str, config: Mapping[str, Any], text: Any) -> "SourceFolder":
        """Reads a folder with weights. Reads all tensors that exports copy.

        Args:
            config: the content of its config.json.
            text: the config of its text model.
        """
        form, source = form_of_json(config, str(folder / "config.json")), open_weights(folder)
        names, kept, copies = form.names(source), form.kept(source, text), form.copies(source, text)
        ours = form.tensors(source, text)
        tied = form.table(replace(text, tie_word_embeddings=True)) if hasattr(text, "tie_word_embeddings") else ()
        untied = bool(tied) and differing_head(tied, ours, form.family.prefix) is not None
        common, vocab = most_common_dtype(ours), form.level(config)["vocab_size"]
        tensors = {name: info for name, info in source.tensors.items() if kept(name)}
        others = [name for name in source.tensors if name not in tensors]
        leaves = dict(tree.leaves(_abstract(text, vocab)))
        for name, of in copies.items():
            name = name.format(layer=text.num_layers)
            if _digest(source.view(name)) != _digest(source.view(names.in_folder(of))):
                raise ConfigError(
                    f"{folder}: {name} differs from {names.in_folder(of)}, but with model.mtp: true, the two are one."
                    " Remove model.mtp"
                )
        layout, stored = form.layout(ours, text, leaves), ()
        if isinstance(source, StoredView):
            rows = expanded(form.table(text, layout), lambda tensor: tensor.sizes(leaves))
            stored = tuple({row.name: None for name, row, _ in rows if names.in_folder(name) in source.stored})
        return cls(
            config,
            location,
            names,
            layout,
            untied,
            embedding_names(tied, ours, form.family.prefix) if tied and not untied else (),
            common.name,
            {name: info.dtype.name for name in others if (info := source.tensors[name]).dtype != common},
            {
                name: KeptTensor(info.dtype.name, info.shape, _digest(source.view(name)))
                for name, info in tensors.items()
            },
            copies,
            {path.name: sha256(path) for path in _processor_files(folder)} if form.part else {},
            stored,
        )

    @classmethod
    def from_json(cls, config: Mapping[str, Any], content: Mapping[str, Any]) -> "SourceFolder":
        """Reads what `to_json` wrote."""
        if not content:
            return cls(config)
        kept = {name: KeptTensor(t["dtype"], tuple(t["shape"]), t["sha256"]) for name, t in content["kept"].items()}
        lists = {key: tuple(content.get(key, ())) for key in ("embedding", "stored")}
        return cls(config, **{**content, "names": Names(**content["names"]), "kept": kept, **lists})

    def to_json(self) -> Json:
        """Everything except `config`."""
        return {key: value for key, value in asdict(self).items() if key != "config"} if self.location else {}

    @property
    def form(self) -> Form | None:
        return form_of_json(self.config, "config.json") if self.config else None

    @property
    def vocab_size(self) -> int | None:
        """The number of rows of its embedding; None for random weights."""
        rows = None if self.form is None else self.form.level(self.config).get("vocab_size")
        return rows if type(rows) is int else None

    @property
    def modules(self) -> "Modules":
        """The names of its modules in transformers."""
        is_part = self.form is not None and self.form.part is not None
        return Modules(IN_TRANSFORMERS if is_part else AS_IN_TABLE, tuple(self.kept))

    def by_modules(self, folder: Path) -> TensorSource:
        """Opens its tensors, by the names of its modules in transformers."""
        source, names = open_weights(folder), self.modules.names
        return NamedTensors(source, {names.in_folder(self.names.in_table(name)): name for name in source.tensors})

    def describe_export(self, parts: str) -> str:
        """What an export has beside the text model; empty if there is nothing else."""
        if not self.kept:
            return ""
        copied, left = f" with {self.describe_kept()} of {self.location}", f" without {self.describe_kept()}"
        return copied if parts == "all" else left

    def describe_kept(self) -> str:
        """The beginnings of the names of kept tensors, with their numbers."""
        counts: dict[str, int] = {}
        for name in self.kept:
            first, second = (*name.split("."), "")[:2]
            start = f"{first}.{second}" if first == "model" else first
            counts[start] = counts.get(start, 0) + 1
        return ", ".join(f"{start}.* ({count} tensors)" for start, count in counts.items())

    def check_fits(self, config: ModelConfig, rows: int) -> None:
        """Checks that the kept tensors fit a model that was made from the source's.

        Args:
            rows: of its embedding.

        Raises:
            ConfigError: it has other layers or widths than the source, or lacks rows of the vocabulary that they need.
        """
        if not self.kept or (form := self.form) is None:
            return
        if not isinstance(config := as_family(config), form.family.config):
            raise self._misfit(f"it was a {form.family.model_types[0]} model")
        level = form.level(self.config)
        original = with_mtp_of(config, config_from_json(form.family, level, "config.json")[0])
        if self.untied:
            original = replace(original, tie_word_embeddings=False)
        vocab = level["vocab_size"]
        before, after, why = _shapes(form, original), _shapes(form, config), ""
        if differing := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            name = differing[0]
            why = f"{name} was {before.get(name, 'absent')} and is {after.get(name, 'absent')}"
        elif rows != vocab and (of_rows := [name for name, t in self.kept.items() if t.shape[:1] == (vocab,)]):
            why = f"{of_rows[0]} has {vocab:,} rows, and the vocabulary has {rows:,}"
        elif lost := [
            f"{key}: {n}" for key, n in self.config.items() if _is_token(key) and type(n) is int and n >= rows
        ]:
            why = f"config.json has {lost[0]}, and the vocabulary has {rows:,} rows"
        if why:
            raise self._misfit(why)

    def check_keeps(self, config: ModelConfig, trained: Collection[str] = ()) -> None:
        """Checks that an export of a model of this config can have the tensors that are stored as they are.

        Args:
            trained: paths of trained leaves.

        Raises:
            ConfigError: there are none, or one of them is trained, or has a trained adapter.
        """
        key = "hf_stored_format: keep (jaxlm convert: --stored_format keep)"
        if not self.stored or (form := self.form) is None:
            raise ConfigError(f"{key} given, but {self.location or 'the source'} has no stored weights. Remove it")
        table = form.table(config, self.layout)
        frozen = {part.path for tensor in table if tensor.name in self.stored for part in tensor.parts}
        others = {part.path for tensor in table for part in tensor.parts} - frozen
        modules = {path.rpartition(".")[0] for path in frozen if path.endswith(".weight")}
        for path in trained:
            parents = (path[:end] for end, character in enumerate(path) if character == ".")
            if path in frozen or (path not in others and not modules.isdisjoint(parents)):
                raise ConfigError(
                    f"{key} given, but {path} is trained, and {self.location} has its weight in a stored form. Freeze it, or"
                    " set hf_stored_format: decode"
                )

    def open_stored(self) -> StoredView:
        """Opens its stored tensors. Raises `PublishError` if they are missing."""
        try:
            source = open_weights(local_folder(self.location, "the source of the export", weights=True), np.float32)
        except ConfigError as error:
            raise PublishError(f"cannot copy stored weights from {self.location}: {error}. Restore it") from error
        if not isinstance(source, StoredView):
            raise PublishError(f"cannot copy stored weights from {self.location}: it has none any more. Restore it")
        return source

    def open(self) -> "OpenedSource":
        """Opens what exports copy. Raises `PublishError` if it is missing or has changed."""
        try:
            folder = local_folder(self.location, "the source of the export", weights=True)
            source = open_weights(folder)
        except ConfigError as error:
            raise PublishError(f"{self._cannot_copy()}: {error}. {_RESTORE}") from error
        for name, kept in self.kept.items():
            info = source.tensors.get(name)
            if info is None or (info.shape, info.dtype.name) != (kept.shape, kept.dtype):
                found = "missing" if info is None else f"{list(info.shape)} {info.dtype.name}"
                expected = f"{list(kept.shape)} {kept.dtype}"
                raise PublishError(f"{self._cannot_copy()}: {name} is {found}, {expected} expected. {_RESTORE}")
        return OpenedSource(self, folder, source)

    def _misfit(self, why: str) -> ConfigError:
        return ConfigError(
            f"the export cannot keep {self.describe_kept()} of {self.location}, which belong to the model as it was: {why}."
            f" {TEXT_ONLY}"
        )

    def _cannot_copy(self) -> str:
        return f"cannot copy {self.describe_kept()} from {self.location}"

    def with_config(self, config: Mapping[str, Any]) -> "SourceFolder":
        """The same folder with another config.json."""
        return replace(self, config=config)

    def text_alone(self, model: ModelConfig) -> "SourceFolder":
        """The source as if it had the text model alone. Args: model: the config of that."""
        if not self.config or (form := self.form) is None:
            return self
        dtypes = {self.names.in_table(name): dtype for name, dtype in self.dtypes.items()}
        config, layout = form.level(self.config), self.layout
        if form.part:
            kind = {"model_type": form.family.model_types[0], "architectures": [form.family.architecture]}
            config, layout = {**without_sections(config), **kind}, 0
        config |= {key: 0 for key in _MTP if config.get(key) and not has_mtp(model)}
        own = {"dtypes": dtypes, "copies": self.copies}
        return SourceFolder(config, self.location, Names(), layout, self.untied, self.embedding, self.dtype, **own)

    def dtype_of(self, dtype: Any) -> Callable[[str, bool], np.dtype]:
        """(Name of a tensor, whether its parameters are float32 in each precision) -> its dtype in an export.

        Args:
            dtype: of all tensors; None for the source's.

        Raises:
            ConfigError: the source's dtypes are not known.
        """
        if dtype is not None:
            return lambda _, is_float32: np.dtype(np.float32 if is_float32 else dtype)
        if not self.dtype:
            raise ConfigError(
                "hf_save_dtype (--dtype): source given, but the model was not made from a folder in Hugging Face format, or"
                " by a version of jaxlm that did not save its dtypes. Give float32, bfloat16 or float16"
            )
        return lambda name, _: np.dtype(jnp.dtype(self.dtypes.get(name, self.dtype)))


@dataclass(frozen=True)
class OpenedSource:
    """The kept tensors and files of a source."""

    source: SourceFolder
    folder: Path
    opened: TensorSource

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Name -> shape and dtype."""
        return {name: self.opened.tensors[name] for name in self.source.kept}

    def view(self, name: str, region: Region = ()) -> np.ndarray:
        """A tensor. Raises `PublishError` if it has changed."""
        array = self.opened.view(name)
        self._check(name, _digest(array), self.source.kept[name].sha256)
        return array[(*region, ...)]

    def where(self, name: str) -> str:
        return self.opened.where(name)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of each file. Raises `PublishError` if one is missing or has changed."""
        for name, expected in self.source.files.items():
            path = self.folder / name
            content = read_bytes(path) if path.is_file() else b""
            self._check(name, hashlib.sha256(content).hexdigest(), expected)
            yield name, content

    def _check(self, name: str, found: str, expected: str) -> None:
        if found != expected:
            raise PublishError(
                f"cannot copy {name} from {self.folder}: it has changed since the model was read from it. {_RESTORE}"
            )


def location_of_source(name: str, folder: Path) -> str:
    """The name by which a source is found later: of a repository, with its commit; of a folder, its whole path."""
    if folder.parent.name == _COMMITS and repository_of(name) is not None:
        return f"{repository_of(name)}@{folder.name}"
    return str(folder.absolute())


def _abstract(config: ModelConfig, vocab_size: int) -> LanguageModel:
    return jax.eval_shape(lambda: config.build(vocab_axis(vocab_size), key=jax.random.key(0)))


def _shapes(form: Form, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the text model's tensors, but for the rows of the vocabulary."""
    leaves, table = dict(tree.leaves(_abstract(config, 1))), form.table(config)
    sizes = {tensor.name: tensor.sizes(leaves) for tensor in table}
    return {name: tensor.shape(sizes[tensor.name]) for name, tensor, _ in expanded(table, lambda t: sizes[t.name])}


def _is_token(key: str) -> bool:
    return key.endswith(("_token_id", "_token_index"))


def _digest(array: np.ndarray) -> str:
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data if flat.size else b"").hexdigest()


def _processor_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _OF_PROCESSORS for path in folder.glob(pattern)})


NO_SOURCE = SourceFolder()
"""Of a model with random weights."""
