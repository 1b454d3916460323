"""The `data` section: the sources, the tokenizer, and how sequences are drawn from them."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import draccus

from jaxlm.core.errors import ConfigError
from jaxlm.core.field_types import PositiveFloat, PositiveInt
from jaxlm.core.rules import Rules, excludes, only
from jaxlm.core.runtime import is_main_process
from jaxlm.data.base import TRAIN, VALIDATION, Log, by_source, given
from jaxlm.data.batch import BatchSpec, Columns
from jaxlm.data.cache.artifacts import Artifacts
from jaxlm.data.cache.build import LOCAL_WORKERS, Workers
from jaxlm.data.cache.token_blocks import FOLDER, BlockMirror
from jaxlm.data.cache.token_cache import TokenCache
from jaxlm.data.corpus import Corpus
from jaxlm.data.data import Data, StopStrategy, ValidationData
from jaxlm.data.examples import Examples, no_targets_within, split_off
from jaxlm.data.formats.base import FormatConfig
from jaxlm.data.loader import Batching
from jaxlm.data.mixture import block_counts, weight_stages
from jaxlm.data.shuffle import EraShuffle
from jaxlm.data.sources.named import NamedSource
from jaxlm.data.sources.source_config import SourceConfig, check_source_names
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.data.tokenizer.train_bpe import TRAIN_BPE, BpeConfig
from jaxlm.reading.choices import Registry
from jaxlm.reading.decode import choice_name, encode
from jaxlm.reading.effects import field


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

    cache_dir: str = field("cache/", on_resume="harmless")
    cache_mirror_gb: PositiveFloat = field(50.0, on_resume="harmless")
    tokenizer: str | BpeConfig = field(TRAIN_BPE, on_resume="content")
    added_tokens: list[str] = field(default_factory=list, on_resume="content")
    vocab_size: PositiveInt | None = field(None, on_resume="content")
    shuffle: bool | EraShuffle = field(True, on_resume="content")
    enforce_bos: bool | None = field(None, on_resume="content")
    enforce_eos: bool = field(True, on_resume="content")
    configs: dict[str, SourceConfig] = field(default_factory=dict, on_resume="content")
    train_weights: dict[str, float] | list[list[Any]] | None = field(None, on_resume="mixture")
    stop_strategy: StopStrategy = field("restart", on_resume="mixture")
    mixture_block_size: PositiveInt = field(2048, on_resume="mixture")
    max_train_batches: PositiveInt | dict[str, PositiveInt] | None = field(None, on_resume="content")
    num_validation_sequences: PositiveInt | dict[str, PositiveInt] | None = field(None, on_resume="content")

    key_rules: ClassVar[Rules] = (
        excludes(
            *(item.name for item in fields(SourceConfig) if item.name != "cache_dir"),
            when="configs",
            why="where each source has its own",
        ),
        only("train_weights", when="configs"),
        excludes(
            "added_tokens",
            when="tokenizer",
            is_=(TRAIN_BPE, BpeConfig),
            why="which is trained, with the special_tokens of {type: bpe, special_tokens: [...]}",
        ),
    )
    expects: ClassVar[str] = "documents"
    """What the formats of its sources produce."""

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
    def batching(self) -> Batching:
        """The way from examples to batches."""
        return Batching()

    @property
    def corpus(self) -> Corpus:
        """The text behind the section, and its tokenizer."""
        store = Artifacts.at(self.cache_dir, "data.cache_dir")
        sections = [("", "data", self, store)]
        if self.configs:
            sections = [
                (
                    name,
                    key := f"data.configs.{name}",
                    config,
                    Artifacts.at(config.cache_dir, f"{key}.cache_dir") if config.cache_dir else store.child(name),
                )
                for name, config in self.configs.items()
            ]
        blocks = BlockMirror(FOLDER, int(self.cache_mirror_gb * 1e9))
        sources = tuple(
            NamedSource(*args, store.folder, blocks, bos=self.enforce_bos, eos=self.enforce_eos) for args in sections
        )
        return Corpus(sources, store, self.tokenizer, self.added_tokens, self.vocab_size, self.enforce_bos)

    @property
    def has_validation(self) -> bool:
        """Tells whether there is any validation data."""
        return self.num_validation_sequences is not None or any(s.has(VALIDATION) for s in self.corpus.sources)

    def check_keys(self) -> None:
        """Raises `ConfigError` if the keys of this kind of data contradict each other. Reads no file."""
        return

    def check(self) -> None:
        """Checks the section and looks up every file, remote ones included. Writes and copies nothing.

        Raises:
            ConfigError: a file is missing, a key is invalid, or an existing cache was built from something else.
        """
        corpus = self.corpus
        corpus.store.check()
        check_mixture(self)
        corpus.check_not_empty()
        corpus.check_tokenizer()
        for source in corpus.sources:
            source.check()

    def check_opens(self, tokenizer: Callable[[], Tokenizer], *, dry: bool) -> None:
        """Raises `ConfigError` if something that batches need besides text cannot be opened. Process 0 calls it first of all.
        Args: dry: write nothing, and do not wait for a server that is not ready."""
        return

    def identity(self) -> dict[str, Any]:
        """The identity of the training data, by content and not by path. Reads all local files, and remote ones once.

        Excludes `cache_dir`, the validation text (nothing is trained on it), and `train_weights` (they may change during a
        run).
        """
        shuffled = {"shuffle": encode(self.shuffle), "enforce_eos": self.enforce_eos}
        return {**self.corpus.identity(), **shuffled, **_limits(self)}

    def is_tokenized(self) -> bool:
        """Tells whether every cache that `open` needs already exists."""
        names = {*_weighted_names(self), *self._held_out}
        return all(
            source.is_tokenized(split)
            for source in self.corpus.sources
            for split in (TRAIN, VALIDATION)
            if source.has(split) and (split == VALIDATION or source.name in names)
        )

    def open(
        self, tokenizer: Tokenizer, seq_len: int, log: Log, workers: Workers = LOCAL_WORKERS, *, summarize: bool = True
    ) -> Data:
        """Opens the data as examples of `seq_len` tokens per sequence. Missing caches are tokenized first, by `workers`.

        Args:
            summarize: log how the examples are packed.
        """
        spec = self.batch_spec(seq_len)  # refuses some keys, before anything is tokenized
        names, options = _weighted_names(self), {"workers": workers, "summarize": summarize}
        corpus, batching = self.corpus, self.batching
        train = {}
        for source in (source for source in corpus.sources if source.name in names):
            examples, _ = self._split(source, self._examples(source, TRAIN, tokenizer, seq_len, log, options))
            train[source.name] = batching.finish(examples, source.name, TRAIN, tokenizer)
        sizes = {name: float(len(examples)) for name, examples in train.items()}
        return Data(
            train=train,
            spec=spec,
            validation=self.open_validation(tokenizer, seq_len, log, **options),
            weights=weight_stages(self.train_weights or sizes, _train_names(self)) if self.configs else (),
            block_size=self.mixture_block_size,
            shuffle=self.shuffle,
            stop_strategy=self.stop_strategy,
            max_train_batches=by_source(self.max_train_batches),
            make_batches=batching.maker(tokenizer),
            has_examples_per_step=batching.has_examples_per_step,
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
        spec, batching, validation_sets = self.batch_spec(seq_len), self.batching, []
        for source in self.corpus.sources:
            if source.has(VALIDATION):
                split, examples = VALIDATION, self._examples(source, VALIDATION, tokenizer, seq_len, log, options)
            elif source.name in self._held_out:
                quiet = options | {"summarize": False}
                examples = self._examples(source, split := TRAIN, tokenizer, seq_len, log, quiet)
                _, examples = self._split(source, examples)
            else:
                continue
            finished = batching.finish(examples, source.name, VALIDATION, tokenizer)
            validation_sets.append(ValidationData(source, finished, spec, split))
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


def check_formats(data: DataConfig) -> None:
    """Raises `ConfigError` for a format that does not produce what the section expects."""
    for source in data.corpus.sources:
        record_format = source.config.format
        if record_format.produces != data.expects:
            raise ConfigError(
                f"{source.key}.format.type: {choice_name(type(record_format))} produces {record_format.produces}, but"
                f" data.type: {choice_name(type(data))} expects {data.expects}. Set a format that produces {data.expects}, or"
                " another data.type"
            )


def check_mixture(data: DataConfig) -> None:
    """Checks the keys of the section against each other, without reading any file."""
    check_formats(data)
    _check_limits(data)
    if data.configs:
        _check_configs(data)
    data.check_keys()


def _check_configs(data: DataConfig) -> None:
    check_source_names(data.configs)
    folders = [source.folder for source in data.corpus.sources]
    shared = {str(folder) for folder in folders if folders.count(folder) > 1}
    if shared:
        raise ConfigError(
            f"data.configs: several sources share the cache_dir {', '.join(shared)}. Give each source its own"
        )
    if data.train_weights is not None:
        names = _train_names(data)
        for stage in weight_stages(data.train_weights, names):
            block_counts(stage.weights, names, data.mixture_block_size)


def _train_names(data: DataConfig) -> list[str]:
    return [source.name for source in data.corpus.train_sources]


def _weighted_names(data: DataConfig) -> list[str]:
    """Names of the sources with a weight above 0 in some stage."""
    names = _train_names(data)
    if not data.configs or data.train_weights is None:
        return names
    stages = weight_stages(data.train_weights, names)
    return [name for name in names if any(stage.weights.get(name) for stage in stages)]


def _limits(data: DataConfig) -> dict[str, Any]:
    """The keys with a number of sequences by source that are set."""
    return given(max_train_batches=data.max_train_batches, num_validation_sequences=data.num_validation_sequences)


def _check_limits(data: DataConfig) -> None:
    """Raises `ConfigError` if a key with a number of sequences by source names a source that it cannot apply to."""
    for key, value in _limits(data).items():
        names = _weighted_names(data) if key == "max_train_batches" else _train_names(data)
        if isinstance(value, int) == bool(data.configs):
            expected = "a number of each source, such as {wiki: 100}" if data.configs else "a number such as 100"
            raise ConfigError(f"data.{key}: {value} given, {expected} expected")
        for name in (name for name in by_source(value) if name not in names):
            raise ConfigError(
                f"data.{key}: no source that is trained on is named '{name}'. Sources: {', '.join(names)}"
            )
    held_out = by_source(data.num_validation_sequences)
    for source in data.corpus.sources:
        if source.name in held_out and source.has(VALIDATION):
            raise ConfigError(
                f"data.num_validation_sequences: given for {source.key}, which has validation data of its"
                f" own{source.config.by_default}. Remove one"
            )
