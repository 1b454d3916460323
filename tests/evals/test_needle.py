"""The evaluation `needle`, on models that look back a known number of tokens."""

import dataclasses
from types import SimpleNamespace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from jaxlm.core.errors import ConfigError
from jaxlm.evals.base import EvalConfig, ValidationSet
from jaxlm.evals.needle import NeedleEvalConfig
from jaxlm.models.base import Hidden, LanguageModel, ModelTraits, vocab_axis
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.unstacked import Generator
from jaxlm.reading.decode import decode
from jaxlm.reading.yaml import ConfigSource
from tests.evals.test_gates import MESHES, WHERE, built, context, validation_batches
from tests.evals.test_written import CHARACTERS, Characters

MATCHED = 6  # tokens
LENGTH = 128
LETTERS = "abcdefghij"
SENTENCES = {"needle": " key is {key}. ", "question": " what key is"}
CONFIG = NeedleEvalConfig(**SENTENCES, lengths=[LENGTH], depths=[0.0, 0.5, 1.0], num_samples=3, digits=4)


class Tokenizer(Characters):
    def is_special(self):
        return np.arange(len(CHARACTERS)) == 0


class LooksBack(LanguageModel):
    """Continues the last tokens as they were continued when they came last before, if that is near enough.

    Attributes:
        reach: how many tokens it looks back.
        length: the longest text that it says it reads.
    """

    reach: jnp.ndarray
    length: int = eqx.field(static=True, default=LENGTH)

    @property
    def Vocab(self):
        return vocab_axis(len(CHARACTERS))

    @property
    def Pos(self):
        return Axis("position", self.length)

    def hidden(self, inputs, *, cache=None, taps=(), key=None):
        tokens = inputs.tokens.rearrange(("batch", "position")).array
        width = tokens.shape[1]
        at = jnp.arange(width)
        same = jnp.ones((tokens.shape[0], width, width), bool)
        for back in range(MATCHED):
            column = jnp.roll(tokens, back, axis=1)
            same &= (column[:, :, None] == column[:, None, :]) & (at >= MATCHED)[:, None] & (at >= MATCHED)[None]
        near = (at[None] < at[:, None]) & (at[:, None] - at[None] <= self.reach)
        found = jnp.max(jnp.where(same & near, at[None, None], -1), axis=-1)
        following = jnp.take_along_axis(tokens, jnp.maximum(found, 0) + 1, axis=1)
        predicted = jnp.where(found < 0, 0, following)
        logits = 20.0 * (predicted[..., None] == jnp.arange(len(CHARACTERS)))
        return Hidden(NamedArray(logits, (*inputs.tokens.axes, self.Vocab)), cache)

    def lm_head(self):
        return None

    def init_cache(self, Batch, capacity, dtype):
        raise NotImplementedError


def looking_back(reach: int, **keys) -> LooksBack:
    return LooksBack(jnp.asarray(reach), traits=ModelTraits(reads_beyond=True), **keys)


def haystack(where, rows: int = 16):
    """Batches of rows of 16 letters, in no order."""
    batches = validation_batches(where, 2 * rows // 16 + 1)
    letters = np.random.default_rng(0).integers(0, len(LETTERS), (len(batches), 16, 16))
    ids = np.array([CHARACTERS.index(one) for one in LETTERS])

    def lettered(batch, numbers):
        return dataclasses.replace(batch, tokens=NamedArray(jnp.asarray(ids[numbers]), batch.tokens.axes))

    return [lettered(batch, numbers) for batch, numbers in zip(batches, letters, strict=True)]


def opened(config, where, rows: int = 64):
    return config.open(context(where, None, haystack(where, rows), Tokenizer()))


def test_a_key_is_found_if_the_model_looks_back_far_enough():
    where = WHERE["one device"]()
    size = LENGTH - len(SENTENCES["needle"]) - len("{key}") - len(SENTENCES["question"])  # of the haystack, about
    with where.use():
        for reach, expected in ((LENGTH, [1, 1, 1]), (0.6 * size + 30, [0, 1, 1]), (35, [0, 0, 1]), (1, [0, 0, 0])):
            found = opened(CONFIG, where).run(looking_back(int(reach)))
            assert [found[f"needle/{LENGTH}/depth_{d:g}"] for d in CONFIG.depths] == expected, reach
            assert found[f"needle/{LENGTH}"] == found["needle/accuracy"] == pytest.approx(np.mean(expected))
    assert set(found) == set(CONFIG.metrics.names or ())


def test_texts_have_the_length_and_the_depth_that_were_asked_for():
    where = WHERE["one device"]()
    config = dataclasses.replace(CONFIG, lengths=[64, LENGTH], depths=[0.0, 0.25, 1.0])
    with where.use():
        evaluation = opened(config, where)
        for length in (64, LENGTH):
            for depth in config.depths:
                pairs = list(evaluation._pairs(length, depth))
                texts = ["".join(CHARACTERS[one] for one in context) for context, _ in pairs]
                answers = ["".join(CHARACTERS[one] for one in answer) for _, answer in pairs]
                assert {len(text) + len(answer) for text, answer in zip(texts, answers, strict=True)} == {length}
                for text, answer in zip(texts, answers, strict=True):
                    needle = SENTENCES["needle"].replace("{key}", answer.strip())
                    before, _, after = text.partition(needle)
                    size = len(before) + len(after) - len(SENTENCES["question"])
                    assert len(before) == round(depth * size)
                assert len(set(answers)) == len(set(texts)) == 3, "each sample has its own key and its own haystack"


@pytest.mark.slow
@pytest.mark.parametrize("where", MESHES)
def test_it_counts_what_greedy_decoding_writes(where):
    place = WHERE[where]()
    config = dataclasses.replace(CONFIG, lengths=[48], num_samples=2, digits=1)
    with place.use():
        model = built(0, place, vocab=len(CHARACTERS))
        evaluation = opened(config, place)
        by_depth = {depth: list(evaluation._pairs(48, depth)) for depth in config.depths}
        contexts = [context for pairs in by_depth.values() for context, _ in pairs]
        longer = dataclasses.replace(model, config=dataclasses.replace(model.config, seq_len=64))
        greedy = GenerationConfig(2, temperature=0.0, stop_ids=())
        written = dict(zip(map(tuple, contexts), generate_tokens(Generator.of(longer), contexts, greedy), strict=True))
        right = [written[tuple(context)] == answer for pairs in by_depth.values() for context, answer in pairs]
        assert evaluation.run(model)["needle/accuracy"] == np.mean(right) < 1.0
        evaluation._pairs = lambda length, depth: ((c, written[tuple(c)]) for c, _ in by_depth[depth])
        assert evaluation.run(model)["needle/accuracy"] == 1.0


def test_the_same_keys_are_hidden_each_time():
    tokenizer = Tokenizer()
    keys = [[hidden.answer for hidden in CONFIG.texts(tokenizer, LENGTH, depth)] for depth in (0.0, 0.5, 0.0)]
    assert keys[0] == keys[2] != keys[1]
    others = dataclasses.replace(CONFIG, seed=1)
    assert [hidden.answer for hidden in others.texts(tokenizer, LENGTH, 0.0)] != keys[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lengths": []}, r"lengths: \[\] given, but at least one is expected"),
        ({"depths": [0.5, 0.5]}, r"depths: \[0.5, 0.5\] given, but at least one is expected, and each only once"),
        ({"needle": "none"}, "but {key} stands for the pass key in the needle, and only there"),
        ({"depths": [1.5]}, "depths"),
    ],
)
def test_invalid_keys_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        decode(EvalConfig, ConfigSource({"type": "needle", **keys})).check()


def test_impossible_lengths_are_refused():
    where = WHERE["one device"]()
    with pytest.raises(ConfigError, match=r"lengths: 24 given, but pass key, question and answer have 3\d tokens"):
        dataclasses.replace(CONFIG, lengths=[24]).check_opens(Tokenizer, LENGTH, dry=True)
    table = SimpleNamespace(Pos=Axis("position", 64), traits=ModelTraits(reads_beyond=False))
    with pytest.raises(ConfigError, match=r"lengths: 128 given, but .* more than model\.seq_len: 64"):
        CONFIG.check_model(table, None)
    dataclasses.replace(CONFIG, lengths=None).check_model(table, None)
    dataclasses.replace(CONFIG, lengths=[64]).check_model(table, None)
    with pytest.raises(ConfigError, match="at least one is expected"):
        dataclasses.replace(CONFIG, lengths=[]).check_model(table, None)
    first = haystack(where)[0]
    segments = jnp.zeros((16, 16), jnp.int32).at[:5].set(1)
    few = dataclasses.replace(first, segment_ids=NamedArray(segments, first.segment_ids.axes))
    ctx = dataclasses.replace(context(where, None, (), Tokenizer()), validation=(ValidationSet("", (), lambda: [few]),))
    with where.use():
        evaluation = dataclasses.replace(CONFIG, num_samples=1).open(ctx)
        with pytest.raises(ConfigError, match=r"lengths: 128 given, but the validation text has 80 tokens"):
            evaluation.run(looking_back(1))


def test_samples_share_a_text_that_is_too_short_for_all():
    where = WHERE["one device"]()
    with where.use():
        evaluation = opened(dataclasses.replace(CONFIG, num_samples=30), where, rows=16)
        texts = {tuple(context) for context, _ in evaluation._pairs(LENGTH, 1.0)}
    assert len(texts) == 30
