"""Hidden tokens: which they are, by sequence, epoch and time alone, and how many."""

import dataclasses
import json

import numpy as np
import pytest

from jaxlm.core.errors import ConfigError
from jaxlm.core.values.batch_types import MaskedBatch
from jaxlm.core.values.mask_schedule import ContinuousSchedule, SteppedSchedule
from jaxlm.data.batch_schedule import BatchSchedule, BatchSize
from jaxlm.data.masking import MaskedExamples, Masker, MaskingConfig, stratified, uniform_numbers
from jaxlm.data.mixture import Mixture
from jaxlm.data.packing import PackedSequences
from jaxlm.data.sources.source_config import SourceConfig
from jaxlm.data.tokenizer.tokenizer import END_OF_TEXT
from jaxlm.data.tokenizer.train_bpe import BpeConfig
from jaxlm.data.tokens import TokensConfig
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.data.helpers import numbered_cache, open_data, some_text

SEQ_LEN = 32
MASK = "<|mask|>"
BPE = BpeConfig(special_tokens=[END_OF_TEXT, MASK])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    for number in range(8):
        (folder / f"{number}.txt").write_text(some_text(number, 120))
    return folder


def section(corpus, **keys):
    usual = {"train_urls": [f"{corpus}/*.txt"], "cache_dir": f"{corpus}/cache", "vocab_size": 300, "tokenizer": BPE}
    masking = keys.pop("masking", {})
    config = TokensConfig(**usual | keys)
    return dataclasses.replace(config, masking=None if masking is None else MaskingConfig(**masking))


def opened(corpus, **keys):
    return open_data(section(corpus, **keys), SEQ_LEN)


def mixture(corpus, seed=0, **keys):
    data = opened(corpus, **keys)
    return data.mixture(BatchSchedule.of([BatchSize(0, 8)]), seed=seed)


def plain_rows(corpus, numbers):
    """The same sequences without hidden tokens, in the same order."""
    return mixture(corpus, masking=None).read(numbers)


# --- Random numbers ---------------------------------------------------------------------------------------------------


def test_times_are_spread_evenly_over_every_batch():
    for size in (8, 64):
        for batch in range(5):
            numbers = stratified(np.arange(batch * size, (batch + 1) * size), (3,))
            inside = numbers * size
            assert sorted(inside.astype(int)) == list(range(size)), "one in each of equal intervals"
            np.testing.assert_allclose(inside % 1, inside[0] % 1, atol=1e-9, err_msg="(u + b) / B")
            assert abs(numbers.mean() - 0.5) <= 1 / size
    odd = stratified(np.arange(48, 96), (3,))
    assert abs(odd.mean() - 0.5) <= 1 / 48
    places = [stratified(np.array([64 * batch]), (3,))[0] * 64 % 1 for batch in range(64)]
    assert np.histogram(places, 8, (0, 1))[0].tolist() == [8] * 8, "the place in the intervals differs between batches"
    assert not np.allclose(stratified(np.arange(8), (3,)), stratified(np.arange(8), (4,)))


def test_random_numbers_are_uniform_and_depend_on_every_word():
    numbers = uniform_numbers((1, 2, np.arange(200), 4), 50)
    assert numbers.shape == (200, 50)
    counts = np.histogram(numbers, 20, (0, 1))[0]
    chi_squared = ((counts - 500) ** 2 / 500).sum()
    assert 5 < chi_squared < 40, "19 degrees of freedom"
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.03
    for other in ((2, 2, np.arange(200), 4), (1, 3, np.arange(200), 4), (1, 2, np.arange(200), 5)):
        assert not (uniform_numbers(other, 50) == numbers).any()


@pytest.mark.parametrize(("strata", "size"), [(3, 12), (3, 6), (5, 10)])
def test_strata_spread_the_times_of_other_numbers_of_sequences(strata, size):
    for batch in range(7):
        numbers = stratified(np.arange(batch * size, (batch + 1) * size), (3,), strata)
        assert sorted((numbers * size).astype(int)) == list(range(size)), "one in each of equal intervals"


# --- Schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
def test_schedules_and_their_rates(kind):
    schedule, times = ContinuousSchedule(kind, 0.1, 0.9), np.linspace(0, 1, 101)
    fractions = schedule.fractions(times)
    np.testing.assert_allclose(fractions[[0, -1]], [0.1, 0.9])
    assert (np.diff(fractions) > 0).all()
    middle = {"linear": 0.5, "cosine": 0.1 + 0.8 * (1 - 0.5**0.5), "exponential": 0.3}[kind]
    assert fractions[50] == pytest.approx(middle)
    step = 1e-6
    slopes = (np.log(schedule.fractions(times + step)) - np.log(schedule.fractions(times - step))) / (2 * step)
    np.testing.assert_allclose(schedule.rates(times), slopes, rtol=1e-6, atol=1e-6)


def test_time_steps_have_the_fractions_of_the_schedule():
    steps = SteppedSchedule.of(ContinuousSchedule("linear", 0.15, 0.85), 8)
    times = steps.times(np.linspace(0, 0.999, 800))
    assert sorted(set(times.tolist())) == pytest.approx(np.linspace(0, 1, 8))
    assert sorted(set(steps.fractions(times).tolist())) == pytest.approx(np.linspace(0.15, 0.85, 8))
    assert np.unique(times, return_counts=True)[1].tolist() == [100] * 8
    single = SteppedSchedule((0.15,))
    assert (single.times(np.array([0.2])), single.fractions(np.ones(1))) == (1.0, 0.15)


def test_ranges_of_times_share_the_bound():
    """The mean weight of the hidden tokens is the share of the times, so that those of all ranges add up to 1."""
    numbers, shares = stratified(np.arange(4096), (0,)), []
    for first, last in ((0.0, 0.25), (0.25, 0.75), (0.75, 1.0)):
        masking = MaskingConfig(times=[first, last], mask_schedule_type="cosine", min_mask_fraction=0.01)
        times = masking.times_of(numbers)
        assert (first <= times.min(), times.max() <= last) == (True, True)
        fractions = masking.schedule.fractions(times)
        shares.append((masking.rates(times) * fractions).mean())
        ends = masking.schedule.fractions(np.array([first, last]))
        assert shares[-1] == pytest.approx(ends[1] - ends[0], rel=1e-3), "the integral of the fraction's derivative"
    assert sum(shares) == pytest.approx(0.99, rel=1e-3)
    single = MaskingConfig(times=[0.5, 0.5])
    assert (set(single.times_of(numbers)), single.has_rates) == ({0.5}, False)


def test_ranges_of_equal_shares_of_the_times():
    middle, last = 0.001 + 0.999 * 0.5, 0.001 + 0.999 * 0.9
    assert MaskingConfig(times=[0.1, 0.9]).ranges(2) == pytest.approx([middle, last])
    cosine = MaskingConfig(mask_schedule_type="cosine", strata=3, times=[0.0, 0.5])
    assert cosine.ranges(3) == pytest.approx([0.001 + 0.999 * (1 - np.cos(np.pi / 12 * k)) for k in (1, 2, 3)])
    assert len(cosine.ranges(6)) == 6
    for keys, message in (
        ({"mask_replicas": 2}, "spreads times over the ways of hiding tokens"),
        ({"num_time_steps": 4}, "does not hide each token with the same probability"),
        ({"max_mask_fraction": 0.9}, r"from none at time 0 to all at time 1\. Remove .* max_mask_fraction below 1"),
        ({"strata": 2}, r"data\.masking\.strata: 2 spreads .* over 2, 4, 8, ... equal parts .* Set it to 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            MaskingConfig(**keys).ranges(3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"times": [0.5]}, "a first and a last time"),
        ({"times": [0.5, 0.25]}, "a first and a last time"),
        ({"times": [0.25, 0.5], "num_time_steps": 8}, "only single steps have a fraction"),
    ],
)
def test_times_that_are_no_range_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        MaskingConfig(**keys)


# --- Masks ------------------------------------------------------------------------------------------------------------


def test_hidden_tokens_are_the_mask_token_and_nothing_else_changes(corpus):
    numbers = np.arange(24)
    masked, plain = mixture(corpus).read(numbers), plain_rows(corpus, numbers)
    hidden = masked["loss_mask"] > 0
    mask_id = int(masked["mask_ids"][0])
    np.testing.assert_array_equal(masked["tokens"] == mask_id, hidden)
    np.testing.assert_array_equal(masked["tokens"][~hidden], plain["tokens"][~hidden])
    np.testing.assert_array_equal(masked["targets"], plain["tokens"])
    for name in ("segment_ids", "positions"):
        np.testing.assert_array_equal(masked[name], plain[name])
    assert hidden.any()
    assert not (hidden & (masked["maskable"] == 0)).any()


def test_special_tokens_and_padding_are_never_hidden(corpus):
    numbers = np.arange(200)
    masked = mixture(corpus, masking={"min_mask_fraction": 1.0}).read(numbers)
    tokenizer = section(corpus).corpus.load_tokenizer(lambda _: None)
    special = tokenizer.is_special()
    assert special[tokenizer.bos_id]
    assert special[tokenizer.mask_id]
    assert special.sum() == 2
    targets, hidden = masked["targets"], masked["loss_mask"] > 0
    is_special = special[targets] | (masked["segment_ids"] == 0)
    np.testing.assert_array_equal(hidden, ~is_special)
    assert is_special.any()


def test_counts_follow_the_mode(corpus):
    numbers = np.arange(40)
    fixed = {"mode": "fixed_count", "time_step_mask_fractions": [0.15, 0.5]}
    masked = mixture(corpus, masking=fixed).read(numbers)
    available, count = masked["maskable"].sum(1).astype(int), masked["loss_mask"].sum(1).astype(int)
    fractions = np.where(masked["mask_fractions"] < 0.3, 0.15, 0.5)
    assert set(masked["mask_fractions"].tolist()) == {np.float32(0.15), 0.5}
    assert count.tolist() == [int(n * r) for n, r in zip(available, fractions, strict=True)]
    many = mixture(corpus, masking={"time_step_mask_fractions": [0.3]}).read(np.arange(400))
    drawn = many["loss_mask"].sum(1)
    assert drawn.sum() / many["maskable"].sum() == pytest.approx(0.3, abs=0.02)
    assert drawn.std() > 1, "binomial"
    assert "rates" not in many


def test_masks_depend_on_sequence_and_epoch_but_not_on_the_batch(corpus):
    stream = mixture(corpus)
    size = len(stream.examples_of(0))
    whole = stream.read(np.arange(2 * size))
    for part in (np.arange(3, 11), np.array([size + 5])):
        for name, column in stream.read(part).items():
            np.testing.assert_array_equal(column, whole[name][part])
    _, indices = stream.find(np.arange(2 * size))
    first, second = np.argsort(indices[:size]), size + np.argsort(indices[size:])
    np.testing.assert_array_equal(whole["targets"][first], whole["targets"][second])
    same = (whole["loss_mask"][first] == whole["loss_mask"][second]).all(1)
    assert same.mean() < 0.2, "an epoch has masks of its own"
    by_time = mixture(corpus, masking={"time_step_mask_fractions": [0.5]}).read(np.arange(2 * size))
    assert not (by_time["loss_mask"][first] == by_time["loss_mask"][second]).all(1).any()
    assert len({row.tobytes() for row in by_time["loss_mask"]}) == 2 * size
    other = mixture(corpus, masking={"time_step_mask_fractions": [0.5], "seed": 1}).read(np.arange(2 * size))
    assert (other["loss_mask"] == by_time["loss_mask"]).all(1).mean() < 0.05, "short rows have few masks"


def test_times_are_spread_over_the_batch_and_not_over_each_source(corpus):
    sources = {str(kind): SourceConfig(train_urls=[f"{corpus}/[{kind}]*.txt"]) for kind in ("0-2", "3-7")}
    keys = {"train_urls": [], "configs": sources, "train_weights": {"0-2": 0.3, "3-7": 0.7}, "mixture_block_size": 10}
    keys["cache_dir"] = f"{corpus}/mixed"
    for strata, size in ((1, 8), (3, 12)):
        stream = mixture(corpus, masking={"strata": strata}, **keys)
        for batch in range(4):
            numbers = np.arange(batch * size, (batch + 1) * size)
            assert len(np.unique(stream.find(numbers)[0])) == 2
            fractions = (stream.read(numbers)["mask_fractions"] - 0.001) / 0.999
            assert sorted((fractions * size).astype(int)) == list(range(size))


def test_replicas_are_all_ways_that_a_sequence_is_read_in(corpus):
    stream = mixture(corpus, masking={"mask_replicas": 2})
    examples, size = stream.examples_of(0), len(mixture(corpus).examples_of(0))
    assert len(examples) == 2 * size
    rows = stream.read(np.arange(4 * size))
    ways = {(a.tobytes(), b.tobytes()) for a, b in zip(rows["targets"], rows["loss_mask"], strict=True)}
    assert len(ways) == 2 * size, "the second pass hides the same tokens"
    alone = examples.read(np.arange(2 * size))
    np.testing.assert_array_equal(alone["targets"][::2], alone["targets"][1::2])
    lower = np.minimum(alone["mask_fractions"][::2], alone["mask_fractions"][1::2])
    assert (lower < 0.501).all(), "the times of two ways are spread evenly"
    assert (np.maximum(alone["mask_fractions"][::2], alone["mask_fractions"][1::2]) >= 0.5).all()


def test_what_masks_depend_on_identifies_them(corpus):
    """What is stored about an example with hidden tokens is found by this, so that equal text is not enough."""

    def arrangement(source="", ignored=None, **masking):
        (examples,) = opened(corpus, masking={"mask_replicas": 2, **masking}, ignore_token_id=ignored).train.values()
        masker = dataclasses.replace(examples._masker, source=examples._masker.source + len(source))
        return json.dumps(
            MaskedExamples(examples._examples, masker, examples._num_replicas).arrangement, sort_keys=True
        )

    others = [arrangement(ignored=3), arrangement("another source"), arrangement(mask_replicas=3)]
    others += [arrangement(seed=1), arrangement(mode="fixed_count"), arrangement(mask_schedule_type="cosine")]
    others += [arrangement(max_mask_fraction=0.5), arrangement(num_time_steps=3), arrangement(random_fraction=0.1)]
    assert arrangement() == arrangement(validation_replicas=4)
    assert len({arrangement(), *others}) == 1 + len(others)


def test_a_run_with_masks_of_an_earlier_version_is_told():
    """Other numbers with the same keys need another version, which is part of what identifies the data of a run."""
    masker = Masker(MaskingConfig(min_mask_fraction=0.2), 1, np.arange(40) < 2, source=5)
    masked = MaskedExamples(PackedSequences(numbered_cache(33), 8), masker, None)
    rows = masked.read_drawn(np.arange(4), np.array([0, 0, 1, 1]), np.arange(8, 12))["loss_mask"].astype(bool)
    assert (masker.config.identity()["version"], np.packbits(rows).tobytes().hex()) == (2, "3e8fab04")
    assert masked.arrangement["masking"]["version"] == 2


def test_the_first_batches_of_a_source_are_masked_anew_in_each_epoch(corpus):
    data = opened(corpus, max_train_batches=1, masking={"time_step_mask_fractions": [0.5]})
    stream = data.mixture(BatchSchedule.of([BatchSize(0, 8)]), seed=0)
    assert isinstance(stream, Mixture)
    rows = stream.read(np.arange(32))
    assert len({row.tobytes() for row in rows["targets"]}) == 8
    assert len({row.tobytes() for row in rows["loss_mask"]}) == 32


def test_validation_hides_the_same_tokens_each_time(corpus):
    data = opened(corpus, num_validation_sequences=6, masking={"validation_replicas": 3})
    (held_out,) = data.validation
    assert len(held_out.examples) == 18
    again = opened(corpus, num_validation_sequences=6, masking={"validation_replicas": 3}).validation[0]
    for name, column in held_out.examples.read(np.arange(18)).items():
        np.testing.assert_array_equal(column, again.examples.read(np.arange(18))[name])
    positions = held_out.examples.target_positions(np.arange(18))
    tokens = held_out.examples.cache.read(positions[:, 0], SEQ_LEN)
    np.testing.assert_array_equal(tokens, held_out.examples.read(np.arange(18))["targets"])


def test_some_hidden_tokens_are_replaced_or_left(corpus):
    keys = {"time_step_mask_fractions": [0.5], "random_fraction": 0.1, "unchanged_fraction": 0.1}
    rows = mixture(corpus, masking=keys).read(np.arange(600))
    hidden = rows["loss_mask"] > 0
    is_mask, is_same = rows["tokens"] == rows["mask_ids"][:, None], rows["tokens"] == rows["targets"]
    assert is_same[~hidden].all()
    shares = [float(where[hidden].mean()) for where in (is_mask, is_same, ~is_mask & ~is_same)]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    special = section(corpus).corpus.load_tokenizer(lambda _: None).is_special()
    assert not special[rows["tokens"][hidden & ~is_mask]].any()


def test_prompts_are_not_hidden(corpus):
    """Tokens that the next-token loss does not train on stay as they are."""
    ids = np.arange(40, dtype=np.int32).reshape(4, 10) + 5
    columns = {
        "tokens": ids[:, :-1],
        "loss_mask": np.repeat([[0, 0, 0, 1, 1, 1, 0, 1, 1]], 4, 0).astype(np.float32),
        "segment_ids": np.repeat([[1, 1, 1, 1, 1, 1, 2, 2, 2]], 4, 0),
        "positions": np.zeros((4, 9), np.int32),
    }
    masker = Masker(MaskingConfig(min_mask_fraction=1.0), 3, np.arange(60) < 4)
    rows = masker.mask(columns, np.arange(4), np.zeros(4, int), np.zeros(4))
    assert rows["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 1]] * 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"times": [0.25, 0.5], "min_mask_fraction": 0.2}, (0.4, 0.6)),
        ({"times": [0.5, 0.5], "min_mask_fraction": 0.2}, (0.6, 0.6)),
        ({"time_step_mask_fractions": [0.3, 0.15, 0.6]}, (0.15, 0.6)),
        ({"time_step_mask_fractions": [0.3, 0.15, 0.6], "times": [0.5, 0.5]}, (0.15, 0.15)),
        ({"num_time_steps": 3, "max_mask_fraction": 0.8}, (0.001, 0.8)),
    ],
)
def test_the_range_of_mask_fractions(keys, expected):
    config = MaskingConfig(**keys)
    assert config.mask_range == pytest.approx(expected)
    uniform = (np.arange(64) + 0.5) / 64
    fractions = config.schedule.fractions(config.times_of(uniform))
    assert config.mask_range[0] <= fractions.min() <= fractions.max() <= config.mask_range[1]


def test_the_batch_spec_names_the_columns(corpus):
    data = opened(corpus)
    made = data.spec.make(**dict.fromkeys(data.spec.columns))
    assert isinstance(made, MaskedBatch)
    assert made.mask_range == (MaskingConfig().min_mask_fraction, 1.0)
    columns = data.mixture(BatchSchedule.of([BatchSize(0, 8)]), seed=0).read(np.arange(3))
    assert {name: column.dtype for name, column in data.spec.columns.items()} == {
        name: column.dtype for name, column in columns.items()
    }
    random = section(corpus).random_columns(4, SEQ_LEN, 300, seed=0)
    assert set(random) == set(columns)


@pytest.mark.parametrize(
    ("masking", "message"),
    [
        ({"time_step_mask_fractions": []}, r"\[\] given, at least one fraction expected"),
        ({"time_step_mask_fractions": [0.1], "num_time_steps": 4}, "num_time_steps: 4 given together with time_step"),
        (
            {"min_mask_fraction": 0.5, "max_mask_fraction": 0.2},
            "max_mask_fraction: 0.2 given, but min_mask_fraction is 0.5",
        ),
        ({"max_mask_fraction": 0.0005}, "max_mask_fraction: 0.0005 given, but min_mask_fraction is 0.001"),
        ({"random_fraction": 0.6, "unchanged_fraction": 0.6}, "Together they must not be above 1"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(masking, message):
    with pytest.raises(ConfigError, match=message):
        decode(RunConfig, ConfigSource({"data": {"masking": masking}}))


def test_a_tokenizer_without_a_mask_token_is_refused_and_one_is_saved(corpus):
    plain = section(corpus, tokenizer=BpeConfig(), cache_dir=f"{corpus}/plain")
    tokenizer = plain.corpus.load_tokenizer(lambda _: None)
    with pytest.raises(ConfigError, match=r"the tokenizer has no mask token. Add it: data.added_tokens: \['<\|mask"):
        plain.check_opens(lambda: tokenizer, dry=False)
    named = section(corpus, masking={"mask_token": "<|gap|>"})
    tokenizer = named.corpus.load_tokenizer(lambda _: None)
    with pytest.raises(ConfigError, match="the tokenizer has no token '<|gap|>'".replace("|", r"\|")):
        named.check_opens(lambda: tokenizer, dry=False)
    with pytest.raises(ConfigError, match=r"mask_token: '<.endoftext.>' given, which begins or ends documents"):
        section(corpus, masking={"mask_token": END_OF_TEXT}).check_opens(lambda: tokenizer, dry=False)
    with pytest.raises(
        ConfigError, match=r"mask_token: 'a' given, which texts may have, .* Name a token that no text has"
    ):
        section(corpus, masking={"mask_token": "a"}).check_opens(lambda: tokenizer, dry=False)
    assert not tokenizer.writes_text_with(tokenizer.mask_id)
    other = tokenizer.with_mask_token(7)
    assert (tokenizer.vocabulary()[MASK], other.mask_id) == (tokenizer.mask_id, 7)
    assert other.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"time_step_mask_fractions": [1e-9]}, r": \[1e-09\] given, .* fraction of 1e-09 is hidden"),
        ({"mode": "fixed_count", "time_step_mask_fractions": [0.001]}, r": \[0\.001\] given, .*: less than one token"),
        ({"max_mask_fraction": 0.01}, r": 0\.01 given, .* sequence of 32 \(model\.seq_len\)"),
        ({"times": [0.0, 0.0]}, r": \[0\.0, 0\.0\] given, .* fraction of 0\.001"),
    ],
)
def test_masks_that_hide_nothing_are_refused(corpus, keys, message):
    with pytest.raises(ConfigError, match=r"data\.masking\.[a-z_]*" + message):
        section(corpus, masking=keys).batch_spec(SEQ_LEN)


def test_masks_of_a_single_token_are_allowed(corpus):
    for length in (10, 32, 49):
        section(corpus, masking={"time_step_mask_fractions": [1e-9, 1 / length]}).batch_spec(length)
