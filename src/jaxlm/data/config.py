"""The `data` section: the sources, the tokenizer, and how sequences are drawn from them."""

import abc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import draccus

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.core.runtime import is_main_process
from jaxlm.data.base import TRAIN, VALIDATION, Log, by_source, given
from jaxlm.data.batch import BatchSpec, Columns
from jaxlm.data.cache.build import LOCAL_WORKERS, Workers
from jaxlm.data.cache.shared_cache import CacheStore
from jaxlm.data.cache.token_blocks import FOLDER, BlockMirror
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.data import Data, StopStrategy, ValidationData
from jaxlm.data.examples import Examples, no_targets_within, split_off
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.loader import BatchMaker, example_batches
from jaxlm.data.mixture import block_counts, weight_stages
from jaxlm.data.shuffle import EraShuffle
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.sources.record_files import TextFile
from jaxlm.data.sources.source_config import SourceConfig, check_source_names
from jaxlm.data.tokenizer.tokenizer import Tokenizer, open_tokenizer
from jaxlm.data.tokenizer.train_bpe import (
    DEFAULT_VOCAB_SIZE,
    MADE_FROM,
    TRAIN_BPE,
    BpeConfig,
    bpe_config,
    load_or_train_tokenizer,
)
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name, encode
from jaxlm.reading.effects import Content, Harmless, Mixture


@dataclass(frozen=True)
class DataConfig(SourceConfig, Registry, draccus.ChoiceRegistry, abc.ABC):
    """The training data: one source, or several under `configs`; the tokenizer; and the token caches. `type` says what an
    example is.

    Attributes:
        cache_dir: folder for token caches, the tokenizer trained here, and copies of remote files. If it lies inside a folder
            of training text, its files are not read as text. At a URL (`gs://bucket/cache`), caches and tokenizer are shared:
            the first machine builds them, and the others read only the parts of the caches that they need.
        cache_mirror_gb: most GB of disk for `cache/blocks`, the parts of token caches at a URL that a machine read last.
        tokenizer: path of a tokenizer.json, or of a folder that contains one; `bpe` trains a tokenizer on the training
            files, and `{type: bpe, ...}` does so with options.
        added_tokens: special tokens to add to a loaded tokenizer, such as those that a chat template writes. A model of
            `initialize_from_hf` gets a row for each: the mean of its other rows.
        vocab_size: vocabulary size of the tokenizer trained here; null means 8192. For a loaded tokenizer, the size it must
            have; null accepts any.
        shuffle: shuffle the packed sequences, in a new order each epoch. `false` reads them in order;
            `{type: era, era_length: N}` shuffles only within blocks of N sequences.
        enforce_bos: begin every document with the tokenizer's BOS token. Null does so for plain text. Prompts and
            completions (`format.type: supervised`, `pairs`, `prompts`, ...) then begin as a Hugging Face tokenizer itself
            begins a text, so that the model sees the same in transformers, vLLM and TRL; with a tokenizer that was trained
            here, also with BOS. Chat templates write their own.
        enforce_eos: end every document with the tokenizer's EOS token.
        configs: several sources by name. Each has its own source keys (`train_urls`, `tags`, ...), which then must not be
            set in `data` itself.
        train_weights: sampling weight of each source: `{wiki: 3, code: 1}`, or weights that change at steps of the phase:
            `[[0, {wiki: 1, code: 0}], [1000, {wiki: 1, code: 1}]]`. Null weights each source by its size.
        stop_strategy: when the data ends. `restart`: never, an exhausted source starts over; `first_exhausted`: as soon as
            one source is exhausted; `all_exhausted`: once every source is. The phase ends there if that comes before
            `num_train_steps`.
        mixture_block_size: examples in a block of the mixture. Within each block, the number of examples of each source
            matches its weight exactly, up to rounding.
        max_train_batches: train only on the first sequences of the cache: on as many as fill this many batches of the first
            batch size. By source, `{wiki: 100}`, or a number if there is only one. The default `train_weights` do not
            change by it.
        num_validation_sequences: hold the last sequences of the cache out of training, with their targets (see `stride`), and
            evaluate on them. By source, `{wiki: 100}`, or a number if there is only one.
    """

    cache_dir: Harmless[str] = "cache/"
    cache_mirror_gb: Harmless[PositiveFloat] = 50.0
    tokenizer: Content[str | BpeConfig] = TRAIN_BPE
    added_tokens: Content[list[str]] = field(default_factory=list)
    vocab_size: Content[PositiveInt | None] = None
    shuffle: Content[bool | EraShuffle] = True
    enforce_bos: Content[bool | None] = None
    enforce_eos: Content[bool] = True
    configs: Content[dict[str, SourceConfig]] = field(default_factory=dict)
    train_weights: Mixture[dict[str, float] | list[list[Any]] | None] = None
    stop_strategy: Mixture[StopStrategy] = "restart"
    mixture_block_size: Mixture[PositiveInt] = 2048
    max_train_batches: Content[PositiveInt | dict[str, PositiveInt] | None] = None
    num_validation_sequences: Content[PositiveInt | dict[str, PositiveInt] | None] = None

    reads: ClassVar[str] = "documents"
    """What the formats of its sources make."""

    @classmethod
    def default_choice_name(cls) -> str | None:
        return "tokens"

    @abc.abstractmethod
    def batch_spec(self, seq_len: int) -> BatchSpec[Any]:
        """The shapes of the batches. Raises `ConfigError` for keys that do not suit sequences of this length."""

    @abc.abstractmethod
    def arrange(self, cache: TokenCache, record_format: FormatConfig, seq_len: int) -> Examples:
        """The examples in a token cache of one source."""

    @abc.abstractmethod
    def random_columns(self, num_examples: int, seq_len: int, vocab_size: int, seed: int) -> Columns:
        """Columns of random examples, [num_examples, ...] each, for benchmarks."""

    @property
    def never_repeats(self) -> str | None:
        """The key with which the text is not read alike in every epoch, and what to change, so that what is stored about an
        example fits again; None if examples repeat."""
        return None

    @property
    def noise(self) -> str | None:
        """The number of hidden tokens of the sequences, in words; None if none are hidden."""
        return None

    @property
    def packs_documents(self) -> bool:
        """Tells whether a sequence may have several documents."""
        return False

    @property
    def has_examples_per_step(self) -> bool:
        """Tells whether each step trains on as many new examples as its batch has, so that epochs determine the steps."""
        return True

    def batch_maker(self, tokenizer: Tokenizer) -> BatchMaker:
        """Returns the function that makes batches of the training examples."""
        return example_batches

    def mask_ranges(self, count: int) -> list[float]:
        """The largest mask fraction in each of `count` ranges of times. A batch has the same number of sequences in each.

        Raises:
            ConfigError: no tokens are hidden, or batches do not.
        """
        raise ConfigError("the data hides no tokens. Set data.masking: {} (data.type: tokens)")

    def check_batch_size(self, size: int) -> None:
        """Raises `ConfigError` if batches of this many sequences cannot be what the section promises."""

    def finished(self, examples: Examples, source: str, split: str, tokenizer: Tokenizer) -> Examples:
        """The examples of a split as batches read them. Args: source: its name."""
        return examples

    def saved_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer as it is saved with a model that was trained on this data."""
        return tokenizer

    def sources(self) -> tuple[NamedSource, ...]:
        """The sources under `configs`, or the section itself as the only one."""
        store = self.cache_store
        sections = [("", "data", self, store)]
        if self.configs:
            sections = [
                (name, key := f"data.configs.{name}", config, self._store_of(name, config, f"{key}.cache_dir"))
                for name, config in self.configs.items()
            ]
        blocks = BlockMirror(FOLDER, int(self.cache_mirror_gb * 1e9))
        return tuple(
            NamedSource(*args, store.folder, blocks, bos=self.enforce_bos, eos=self.enforce_eos) for args in sections
        )

    @property
    def cache_store(self) -> CacheStore:
        """The folder of the caches, and where it is shared."""
        return CacheStore.at(self.cache_dir, "data.cache_dir")

    def _store_of(self, name: str, config: SourceConfig, key: str) -> CacheStore:
        return CacheStore.at(config.cache_dir, key) if config.cache_dir else self.cache_store.child(name)

    def chat_templates(self) -> list[str]:
        """The chat templates given for the training sources, as in the configuration; that of the first source last."""
        templates = (source.config.format.given_template() for source in self.sources() if source.has(TRAIN))
        return [template for template in templates if template is not None][::-1]

    @property
    def has_validation(self) -> bool:
        """Tells whether there is any validation data."""
        return self.num_validation_sequences is not None or any(source.has(VALIDATION) for source in self.sources())

    def train_source_names(self) -> list[str]:
        """Names of the sources that have training data."""
        return [source.name for source in self.sources() if source.has(TRAIN)]

    def check(self) -> None:
        """Checks the section and looks up every file, remote ones included. Writes and copies nothing.

        Raises:
            ConfigError: a file is missing, a key is invalid, or an existing cache was built from something else.
        """
        self.cache_store.check()
        self.check_mixture()
        self.check_not_empty()
        self.check_tokenizer()
        for source in self.sources():
            source.check()

    def check_not_empty(self) -> None:
        """Raises `ConfigError` if nothing is named to train on. Needs no files."""
        for source in self.sources() if self.configs else ():
            if not (source.has(TRAIN) or source.has(VALIDATION)):
                raise ConfigError(
                    f"{source.key}: a source without text, which would be left out. Give train_urls, id, source or"
                    " validation_urls: cache_dir says where a cache is made, and caches of other programs are not read"
                )
        if not self.train_source_names():
            where = "data.configs: no source has train_urls" if self.configs else "data.train_urls: empty"
            raise ConfigError(f"{where}. Give files, folders, globs or 'stdlib:train', or set id to a dataset")

    def check_opens(self, tokenizer: Callable[[], Tokenizer], *, dry: bool) -> None:
        """Raises `ConfigError` if something that batches need besides text cannot be opened. Process 0 calls it first of all.
        Args: dry: write nothing, and do not wait for a server that is not ready."""
        return

    def identity(self) -> dict[str, Any]:
        """The identity of the training data, by content and not by path. Reads all local files, and remote ones once.

        Excludes `cache_dir`, the validation text (nothing is trained on it), and `train_weights` (they may change during a
        run).
        """
        by_name = {source.name: source.content() for source in self.sources() if source.has(TRAIN)}
        return {
            **(by_name.get("") or {"sources": by_name}),
            "tokenizer": self._tokenizer_identity(),
            "shuffle": encode(self.shuffle),
            "enforce_bos": self._begin(),
            "enforce_eos": self.enforce_eos,
            **self._limits,
        }

    @property
    def prompt_bos(self) -> bool | None:
        """Tells whether a text to continue begins with BOS, as in training; None for what the tokenizer itself does."""
        if self.enforce_bos is not None:
            return self.enforce_bos
        formats = [source.config.format for source in self.sources() if source.has(TRAIN)]
        are_answers = all(one.bos_policy in ("prompt", "template") for one in formats)
        return None if formats and are_answers else True

    def known_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None for one that is trained, or if no document depends on what it puts in front of a text."""
        depends = self.enforce_bos is None and any(s.config.format.bos_policy == "prompt" for s in self.sources())
        return None if bpe_config(self.tokenizer) or not depends else self.load_tokenizer(log=lambda _: None)

    def describe_begin(self) -> str:
        """Says what the documents that are trained on begin with, and why, for the table at the start."""
        try:
            tokenizer = self.known_tokenizer()
        except ConfigError:
            return "documents begin as data.tokenizer says, which cannot be read"
        begin = {s.name: s.describe_begin(tokenizer) for s in self.sources() if s.has(TRAIN)}
        if len(set(begin.values())) == 1:
            return f"documents {next(iter(begin.values()))}"
        return "; ".join(f"documents of {name} {how}" for name, how in begin.items())

    def _begin(self) -> Any:
        """Returns what the documents of the training sources begin with (`NamedSource.begin`), by source if they differ."""
        tokenizer = self.known_tokenizer()
        begin = {source.name: source.begin(tokenizer) for source in self.sources() if source.has(TRAIN)}
        values = list(begin.values())
        return values[0] if values and all(value == values[0] for value in values) else begin

    def load_tokenizer(self, log: Log) -> Tokenizer:
        """Loads the tokenizer, and trains it first if `tokenizer` is `bpe` and it does not exist yet.

        Raises:
            ConfigError: the tokenizer does not exist, or its vocabulary size is not `vocab_size`.
        """
        bpe = bpe_config(self.tokenizer)
        if bpe is None:
            tokenizer = open_tokenizer(str(self.tokenizer), self.added_tokens, self.vocab_size)
            tokenizer.note_template(log)
            return tokenizer
        formats = {source.name: source.config.format.cache_key() for source in self.sources()}
        folder = self.cache_store.folder / "tokenizer"
        with self.cache_store.shared(folder, MADE_FROM, log):
            return load_or_train_tokenizer(
                folder,
                self._all_files(log),
                lambda: self._all_texts(log),
                self.vocab_size or DEFAULT_VOCAB_SIZE,
                log,
                formats={name: format_key for name, format_key in formats.items() if format_key},
                config=bpe,
            )

    def is_tokenized(self) -> bool:
        """Tells whether every cache that `open` needs already exists."""
        names = self._weighted_names()
        return all(
            source.is_tokenized(split)
            for source in self.sources()
            for split in (TRAIN, VALIDATION)
            if source.has(split) and (split == VALIDATION or source.name in {*names, *self._held_out})
        )

    def open(
        self, tokenizer: Tokenizer, seq_len: int, log: Log, workers: Workers = LOCAL_WORKERS, *, summarize: bool = True
    ) -> Data:
        """Opens the data as examples of `seq_len` tokens per sequence. Missing caches are tokenized first, by `workers`.

        Args:
            summarize: log how the examples are packed.
        """
        spec = self.batch_spec(seq_len)  # refuses some keys, before anything is tokenized
        names, options = self._weighted_names(), {"workers": workers, "summarize": summarize}
        train = {
            source.name: self.finished(
                self._split(source, self._examples(source, TRAIN, tokenizer, seq_len, log, options))[0],
                source.name,
                TRAIN,
                tokenizer,
            )
            for source in self.sources()
            if source.name in names
        }
        sizes = {name: float(len(examples)) for name, examples in train.items()}
        return Data(
            train=train,
            spec=spec,
            validation=self.open_validation(tokenizer, seq_len, log, **options),
            weights=weight_stages(self.train_weights or sizes, self.train_source_names()) if self.configs else (),
            block_size=self.mixture_block_size,
            shuffle=self.shuffle,
            stop_strategy=self.stop_strategy,
            max_train_batches=by_source(self.max_train_batches),
            make_batches=self.batch_maker(tokenizer),
            has_examples_per_step=self.has_examples_per_step,
        )

    def open_validation(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        log: Log,
        *,
        separate_cache: bool = False,
        workers: Workers = LOCAL_WORKERS,
        summarize: bool = True,
    ) -> tuple[ValidationData, ...]:
        """Opens only the validation data, for each source that has any or of which some is held out.

        Args:
            separate_cache: use a cache folder named after the cache key, so that these caches never conflict with those of
                the run.
        """
        options = {"separate_cache": separate_cache, "workers": workers, "summarize": summarize}
        spec, validation_sets = self.batch_spec(seq_len), []
        for source in self.sources():
            if source.has(VALIDATION):
                examples = self._examples(source, VALIDATION, tokenizer, seq_len, log, options)
                finished = self.finished(examples, source.name, VALIDATION, tokenizer)
                validation_sets.append(ValidationData(source, finished, spec))
            elif source.name in self._held_out:
                examples = self._examples(source, TRAIN, tokenizer, seq_len, log, options | {"summarize": False})
                held_out = self.finished(self._split(source, examples)[1], source.name, VALIDATION, tokenizer)
                validation_sets.append(ValidationData(source, held_out, spec, TRAIN))
        return tuple(validation_sets)

    @property
    def _held_out(self) -> dict[str, int]:
        """Source name -> number of sequences that are held out of training."""
        return by_source(self.num_validation_sequences)

    def _split(self, source: NamedSource, examples: Examples) -> tuple[Examples, Examples]:
        return split_off(examples, self._held_out.get(source.name, 0), source.key)

    def _examples(
        self, source: NamedSource, split: str, tokenizer: Tokenizer, seq_len: int, log: Log, options: dict[str, Any]
    ) -> Examples:
        """Args: options: `summarize`, and further arguments of `NamedSource.open_cache`."""
        cache = source.open_cache(split, tokenizer, log, **{k: v for k, v in options.items() if k != "summarize"})
        record_format = source.config.format
        examples = self.arrange(cache, record_format, seq_len)
        if not len(examples):
            raise ConfigError(no_targets_within(cache, seq_len, source.key, split, record_format.overlong))
        if options["summarize"] and is_main_process() and (how := source.describe_records(split, tokenizer)):
            source.log_with_name(log)(f"{split}: {how}")
        if options["summarize"] and examples.summary:
            source.log_with_name(log)(f"{split}: {examples.summary}")
        return examples

    def validation_documents(self) -> Iterator[str]:
        if any(source.config.format.bos_policy == "ids" for source in self.sources()):
            return iter(())  # token ids are not the text they were made from
        return itertools.chain.from_iterable(source.documents(VALIDATION) for source in self.sources())

    def _weighted_names(self) -> list[str]:
        """Names of the sources with a weight above 0 in some stage."""
        names = self.train_source_names()
        if not self.configs or self.train_weights is None:
            return names
        stages = weight_stages(self.train_weights, names)
        return [name for name in names if any(stage.weights.get(name) for stage in stages)]

    def _all_files(self, log: Log) -> list[TextFile]:
        """The training files of all sources; names are prefixed with the source's name to be unique."""
        return [
            replace(file, name=f"{source.name}/{file.name}") if source.name else file
            for source in self.sources()
            for file in source.identified(TRAIN, log)
        ]

    def _all_texts(self, log: Log) -> Iterator[str]:
        return itertools.chain.from_iterable(source.documents(TRAIN, log) for source in self.sources())

    def check_mixture(self) -> None:
        """Checks `configs`, `train_weights` and `mixture_block_size` without reading any file."""
        for source in self.sources():
            record_format = source.config.format
            if record_format.makes != self.reads:
                raise ConfigError(
                    f"{source.key}.format.type: {choice_name(type(record_format))} makes {record_format.makes}, but"
                    f" data.type: {choice_name(type(self))} reads {self.reads}. Set a format that makes {self.reads}, or"
                    " another data.type"
                )
        self._check_limits()
        if self.mixture_block_size < 1:
            raise ConfigError(f"data.mixture_block_size: {self.mixture_block_size} given, 1 or more expected")
        if not self.configs:
            if self.train_weights is not None:
                raise ConfigError(
                    "data.train_weights: has no effect with a single source. Define several sources under data.configs"
                )
            return
        defaults = type(self)()
        for key in (item.name for item in fields(SourceConfig) if item.name != "cache_dir"):
            if getattr(self, key) != getattr(defaults, key):
                raise ConfigError(
                    f"data.{key}: has no effect together with data.configs, where each source has its own. Move it into a"
                    " source, or remove it"
                )
        check_source_names(self.configs)
        folders = [source.folder for source in self.sources()]
        shared = {str(folder) for folder in folders if folders.count(folder) > 1}
        if shared:
            raise ConfigError(
                f"data.configs: several sources share the cache_dir {', '.join(shared)}. Give each source its own"
            )
        if self.train_weights is not None:
            names = self.train_source_names()
            for stage in weight_stages(self.train_weights, names):
                block_counts(stage.weights, names, self.mixture_block_size)

    @property
    def _limits(self) -> dict[str, Any]:
        """The keys with a number of sequences by source that are set."""
        return given(max_train_batches=self.max_train_batches, num_validation_sequences=self.num_validation_sequences)

    def _check_limits(self) -> None:
        """Raises `ConfigError` if a key with a number of sequences by source names a source that it cannot apply to."""
        for key, value in self._limits.items():
            names = self._weighted_names() if key == "max_train_batches" else self.train_source_names()
            if isinstance(value, int) == bool(self.configs):
                expected = "a number of each source, such as {wiki: 100}" if self.configs else "a number such as 100"
                raise ConfigError(f"data.{key}: {value} given, {expected} expected")
            for name in (name for name in by_source(value) if name not in names):
                raise ConfigError(
                    f"data.{key}: no source that is trained on is named '{name}'. Sources: {', '.join(names)}"
                )
        for source in (source for source in self.sources() if source.name in self._held_out and source.has(VALIDATION)):
            raise ConfigError(
                f"data.num_validation_sequences: given for {source.key}, which has validation data of its"
                f" own{source.config.by_default}. Remove one"
            )

    def check_tokenizer(self) -> None:
        """Raises `ConfigError` if the tokenizer cannot be loaded or trained, or lacks something that a format needs."""
        if bpe := bpe_config(self.tokenizer):
            bpe.check(self.vocab_size)
            if self.added_tokens:
                raise ConfigError(
                    "data.added_tokens: given for a tokenizer that is trained. Set data.tokenizer: {type: bpe,"
                    " special_tokens: [...]} instead"
                )
            return
        tokenizer = self.load_tokenizer(log=lambda _: None)
        for source in self.sources():
            source.encoder(tokenizer)

    def _tokenizer_identity(self) -> Any:
        if bpe := bpe_config(self.tokenizer):
            return {TRAIN_BPE: self.vocab_size or DEFAULT_VOCAB_SIZE, **bpe.cache_key()}
        return open_tokenizer(str(self.tokenizer), self.added_tokens, None).fingerprint
