"""A prefix cache of a model with recurrent layers: what it reuses is what it would compute again."""

import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from jaxlm.models.inference import prefix_cache as prefix_cache_module
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.unstacked import Generator
from tests.models.recurrent import RecurrentConfig

SIZES = {"seq_len": 512, "hidden_dim": 16, "intermediate_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
NEW = 8


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 40, length).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("separate", [True, False], ids=["separate layers", "stacked layers"])
def test_turns_equal_generation_without_a_cache(separate, built, monkeypatch):
    """Prompts that append, that change the last answer, or an earlier turn; the same one again, and another text."""
    monkeypatch.setattr(prefix_cache_module, "_PREFILL_CHUNK", 64)
    model, reused, reusable = built(RecurrentConfig(**SIZES)), [], PrefixCache._reusable

    def told(self, *args):
        found = reusable(self, *args)
        reused.append(found[0])
        return found

    monkeypatch.setattr(PrefixCache, "_reusable", told)
    writer = Generator.of(model) if separate else Generator(model, model)
    prefix_cache, prompt, decoding = PrefixCache(), text(0, 150), GenerationConfig(NEW, temperature=0.0)
    expected = []
    for turn in range(6):
        pieces = stream_tokens(writer, [prompt], decoding, every=3, prefix_cache=prefix_cache)
        answer = [token for (piece,) in pieces for token in piece]
        assert answer == generate_tokens(writer, [prompt], decoding)[0], turn
        other = [(token + 1) % 40 for token in answer]
        # The next prompt, and the last snapshot of what it shares with this one.
        prompt, snapshot = [
            ([*prompt, *answer, *text(1, 5)], len(prompt) + NEW - 1),
            ([*prompt, *other, *text(2, 5)], len(prompt)),
            ([*prompt[:100], *text(3, 70)], 64),
            (prompt, 128),
            (text(4, 40), 0),
            (prompt, 0),
        ][turn]
        expected.append(snapshot)
    assert reused == expected[:5]


@pytest.mark.slow
def test_the_oldest_snapshots_are_dropped(built, monkeypatch):
    monkeypatch.setattr(prefix_cache_module, "_PREFILL_CHUNK", 64)
    writer, prefix_cache = Generator.of(built(RecurrentConfig(**SIZES))), PrefixCache()
    decoding, prompt = GenerationConfig(NEW, temperature=0.0), text(0, 300)
    list(stream_tokens(writer, [prompt], decoding, every=NEW, prefix_cache=prefix_cache))
    assert list(prefix_cache._snapshots) == [64, 128, 192, 256, 300]
    size = prefix_cache._snapshots[64].num_bytes
    assert size == 4 * 16 + 4  # one state of 16 features, and its document
    monkeypatch.setattr(prefix_cache_module, "_SNAPSHOT_BYTES", 3 * size)
    prompt = [*prompt[:290], *text(1, 20)]
    list(stream_tokens(writer, [prompt], decoding, every=NEW, prefix_cache=prefix_cache))
    assert list(prefix_cache._snapshots) == [192, 256, 310]


def test_a_state_has_as_many_bytes_whatever_the_text(built):
    model = built(RecurrentConfig(**SIZES))
    short, long = (model.init_cache(Axis("batch", 3), capacity, jnp.bfloat16) for capacity in (8, 64))
    assert short.bytes_per_row == long.bytes_per_row == 4 * 16 + 4
    assert short.bytes_per_token == long.bytes_per_token == 2 * 2 * 2 * 4  # keys and values of one layer
