"""Losses by source and tag, against sums over the same batches computed by hand."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxlm.core.values.sums import DummyPrefix
from jaxlm.data.loader import eval_batches
from jaxlm.data.packing import PackedSequences
from jaxlm.data.tokenizer.tokenizer import Tokenizer
from jaxlm.data.tokens import TokensConfig
from jaxlm.evals.base import EvalContext, ValidationSet
from jaxlm.evals.loss import EvalLoss, LossEval, LossMeter, by_group, macro
from jaxlm.models.base import vocab_axis
from jaxlm.objectives.next_token import score_batch
from tests.data.helpers import cache_of, small_tokenizer
from tests.engine.helpers import F32, MODEL, VOCAB, one_device

TOKEN_BYTES = np.arange(VOCAB, dtype=np.int32) % 5


def windows(seed: int, num_documents: int) -> PackedSequences:
    rng = np.random.default_rng(seed)
    return PackedSequences(
        cache_of([rng.integers(0, VOCAB, 30).tolist() for _ in range(num_documents)], VOCAB), MODEL.seq_len
    )


def built(vocab: int = VOCAB):
    return jax.jit(lambda: MODEL.build(vocab_axis(vocab), key=jax.random.key(0)))()


@pytest.mark.slow
def test_sources_tags_the_total_and_the_means_over_sources():
    layout = one_device()
    data = {"prose": windows(0, 9), "code": windows(1, 2), "chat": windows(2, 4)}
    tags = {"prose": ("en",), "code": (), "chat": ("en", "sft")}

    cap: dict[str, int | None] = {"max_batches": None}

    def batches(name: str):
        return eval_batches(data[name], TokensConfig().batch_spec(MODEL.seq_len), batch_size=4, layout=layout, **cap)

    sets = tuple(ValidationSet(name, tags[name], functools.partial(batches, name)) for name in data)
    with layout.use():
        model = built()
        tested, without_bytes = (
            LossEval(EvalContext(layout, F32, None, known, sets, print, 8, score_batch))
            for known in (TOKEN_BYTES, None)
        )
        meter = LossMeter(F32, score_batch, TOKEN_BYTES)

        def alone() -> dict[str, EvalLoss]:
            return {name: meter.measure(model, ((batch, None) for batch in batches(name)))[0] for name in data}

        found, whole, without = tested.run(model), alone(), without_bytes.run(model)
        cap["max_batches"] = 1
        capped, first = tested.run(model), alone()
    tokens = {name: float(w.read(np.arange(len(w)))["loss_mask"].sum()) for name, w in data.items()}
    loss = {name: part.loss for name, part in whole.items()}
    assert set(found) == {"macro_loss", "macro_bpb"} | {
        f"{group}{kind}" for group in ("", "prose/", "code/", "chat/", "en/", "sft/") for kind in ("loss", "bpb")
    }
    assert without == {name: value for name, value in found.items() if not name.endswith("bpb")}

    def mean(names) -> float:
        return math.fsum(loss[n] * tokens[n] for n in names) / math.fsum(tokens[n] for n in names)

    for name in data:
        assert found[f"{name}/loss"] == loss[name]
        assert found[f"{name}/bpb"] == whole[name].bits_per_byte
    assert found["loss"] == pytest.approx(mean(data), rel=1e-12)
    assert found["en/loss"] == pytest.approx(mean(["prose", "chat"]), rel=1e-12)
    assert found["sft/loss"] == loss["chat"]
    assert found["macro_loss"] == pytest.approx(sum(loss.values()) / 3, rel=1e-12)
    assert found["macro_bpb"] == pytest.approx(sum(part.bits_per_byte for part in whole.values()) / 3, rel=1e-12)
    # The maximum applies to each source, so the small one is not crowded out.
    assert {name: capped[f"{name}/loss"] for name in data} == {name: part.loss for name, part in first.items()}


def test_without_tokens_there_is_no_mean():
    nothing, some = EvalLoss(0, 0, 0, 0), EvalLoss(6, 3, 4, 2)
    assert macro([some, nothing]) == {"macro_loss": 2.0, "macro_bpb": 2 / math.log(2)}
    assert math.isnan(macro([nothing])["macro_loss"])
    assert by_group({"a": some, "b": some}, {"a": ["b"]}) == {"a": some, "b": EvalLoss(12, 6, 8, 4)}


@pytest.mark.slow
def test_a_dummy_prefix_does_not_count_as_a_byte():
    """SentencePiece puts a space in front of every text: the bytes of all texts are counted exactly."""
    import tokenizers
    from tokenizers import models, normalizers

    words = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a"]
    numbers = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(numbers, [("\u2581", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.add_special_tokens(words[:3])
    tokenizer = Tokenizer(backend, 1, 2)
    texts = ["ab a", "b", " ab", "ba  b a"]
    documents = [[1, *ids, 2] for ids in tokenizer.encode_batch(texts)]
    data = PackedSequences(cache_of(documents, VOCAB), 64)
    layout = one_device()
    with layout.use():
        spec = TokensConfig().batch_spec(64)
        batches = eval_batches(data, spec, batch_size=1, layout=layout, max_batches=None)
        table = np.zeros(VOCAB, np.int32)
        table[: len(words)] = tokenizer.token_bytes()
        prefix = tokenizer.dummy_prefix()
        assert prefix is not None
        prefix = DummyPrefix(prefix.bos_id, np.pad(prefix.tokens, (0, VOCAB - len(words))))
        meter = LossMeter(F32, score_batch, table, dummy_prefix=prefix)
        [sums] = meter.measure(built(), ((batch, None) for batch in batches))
    assert sums.text_bytes == sum(len(text.encode()) for text in texts)
    assert small_tokenizer().dummy_prefix() is None


@pytest.mark.slow
def test_bits_per_byte_count_raw_bytes_and_no_special_tokens():
    """The formula in NumPy, with parts of characters, which decode to three bytes each, and the end of documents."""
    tokenizer = small_tokenizer()
    texts = ["größe 名前 🙂 🙃 ü", "\u00e9\u4e00\U0001f600", "plain text"]
    documents = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    flat = [token for document in documents for token in document]
    raw = tokenizer.token_bytes()
    decoded = [len(tokenizer.decode([token]).encode()) for token in flat]
    assert sum(decoded) > sum(raw[flat]) == sum(len(text.encode()) for text in texts)
    data = PackedSequences(cache_of(documents, tokenizer.vocab_size), len(flat))
    layout = one_device()
    with layout.use():
        model = built(tokenizer.vocab_size)
        spec = TokensConfig().batch_spec(len(flat))
        [batch] = eval_batches(data, spec, batch_size=1, layout=layout, max_batches=None)
        [sums] = LossMeter(F32, score_batch, raw).measure(model, [(batch, None)])
        scores = jax.jit(score_batch)(model, batch)
    nats, targets, mask = (np.asarray(x.array, np.float64).ravel() for x in (scores.nats, scores.targets, scores.mask))
    num_bytes = raw[targets.astype(int)] * mask
    expected = (nats * (num_bytes > 0)).sum() / (math.log(2) * num_bytes.sum())
    assert sums.bits_per_byte == pytest.approx(expected, rel=1e-6)
    assert 0 < (num_bytes == 0).sum() < len(flat)
    assert sums.text_nats < sums.nats
