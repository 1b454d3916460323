"""A text that grows from turn to turn: with a prefix cache, the output equals that of processing the whole text."""

import jax
import numpy as np
import pytest
from haliax import NamedArray

from jaxlm.interop.hf.families.gemma3 import Gemma3Config
from jaxlm.interop.hf.families.gpt2 import Gpt2Config
from jaxlm.interop.hf.families.llama import LlamaConfig
from jaxlm.interop.hf.families.mistral import MistralConfig
from jaxlm.interop.hf.families.mpt import MptConfig
from jaxlm.models.inference import prefix_cache as prefix_cache_module
from jaxlm.models.inference.generate import GenerationConfig, generate_tokens, stream_tokens
from jaxlm.models.inference.prefix_cache import PrefixCache
from jaxlm.models.inference.unstacked import Generator
from tests.engine.helpers import layout

SIZES = {"seq_len": 512, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
LLAMA = LlamaConfig(**SIZES)
END, NEW = 39, 12


def text(seed, length):
    return np.random.default_rng(seed).integers(0, END, length).tolist()


def updated(model, decoding, monkeypatch):
    """(continuations with the cache, those without, number of reused tokens) of turns that use the cache in every way: append
    to it, change an earlier turn, begin differently, repeat the same request."""
    held, lookup = [], PrefixCache.lookup

    def told(self, *args):
        found = lookup(self, *args)
        held.append(found[1])
        return found

    monkeypatch.setattr(PrefixCache, "lookup", told)
    prefix_cache, prompt, writer = PrefixCache(), text(0, 65), Generator.of(model)
    ours, anew = [], []
    for turn in range(6):
        pieces = stream_tokens(writer, [prompt], decoding, every=8, prefix_cache=prefix_cache)
        if turn == 1:
            ours.append(next(pieces)[0])  # interrupted after the first piece
            pieces.close()
        else:
            ours.append([token for (piece,) in pieces for token in piece])
        anew.append(generate_tokens(writer, [prompt], decoding)[0][: len(ours[-1])])
        following = [*prompt, *ours[-1], END, *text(turn + 1, 5)]
        prompt = [following, following, [*following[:60], END, *following[61:]], text(9, 80), prompt, following][turn]
    return ours, anew, held


@pytest.mark.slow
def test_every_turn_equals_generation_without_a_cache(built, monkeypatch):
    ours, anew, held = updated(built(LLAMA), GenerationConfig(NEW, temperature=0.0), monkeypatch)
    assert ours == anew
    # At least 64 tokens are always computed. Turn 3 shares 60 tokens with the previous one, turn 4 none; 5 repeats 4.
    second, third, fourth = 65 + NEW + 6, 65 + NEW + 6 + 8 + 6, 65 + NEW + 6 + 8 + 6 + NEW + 6
    assert held == [0, second - 64, third - 64, fourth - 64, 0, 80 - 64]


OTHERS = {
    "window": (MistralConfig(**SIZES, sliding_window=24), {}),
    "learned positions": (Gpt2Config(seq_len=256, hidden_dim=32, num_layers=2, num_heads=4), {}),
    "alibi": (MptConfig(**{**SIZES, "num_kv_heads": 4}), {}),
    "windows between others": (Gemma3Config(**SIZES, head_dim=8, sliding_window=24, sliding_window_pattern=2), {}),
    "bfloat16": (LLAMA, {"cache_dtype": "bfloat16"}),
    "int8": (LLAMA, {"cache_dtype": "int8"}),
    "drawn": (LLAMA, {"temperature": 1.0, "top_k": 10, "seed": 3}),
}


# Two dtypes that are not float32 have the same cache, and some layers of "windows between others" are those of "window".
COVERED = ("bfloat16", "window")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak if n in COVERED else ()) for n in OTHERS])
def test_prefixes_are_reused_in_every_kind_of_cache(name, built, monkeypatch):
    config, options = OTHERS[name]
    ours, anew, held = updated(
        built(config), GenerationConfig(**{"max_new_tokens": NEW, "temperature": 0.0, **options}), monkeypatch
    )
    assert ours == anew
    assert sum(map(bool, held)) == 4


@pytest.mark.slow
def test_on_a_mesh_and_in_chunks(built, monkeypatch):
    """A long turn is processed in chunks after the cache; rows that fill the batch are padding throughout."""
    monkeypatch.setattr(prefix_cache_module, "_PREFILL_CHUNK", 64)
    model, where, decoding = built(LLAMA), layout(model=2), GenerationConfig(NEW, temperature=0.0)
    prefix_cache, prompts = PrefixCache(), [text(0, 100), [*text(0, 100), *text(1, 150)]]
    expected = [generate_tokens(Generator.of(model), [prompt], decoding)[0] for prompt in prompts]
    with where.use():
        placed = jax.tree.map(
            lambda a: NamedArray(jax.device_put(a.array, where.parameter_sharding(a.axes)), a.axes),
            model,
            is_leaf=lambda a: isinstance(a, NamedArray),
        )
        writer = Generator.of(placed)
        for prompt, whole in zip(prompts, expected, strict=True):
            assert [
                t
                for (piece,) in stream_tokens(writer, [prompt], decoding, every=8, prefix_cache=prefix_cache)
                for t in piece
            ] == whole


def test_a_cache_of_another_kind_is_not_reused():
    prefix_cache = PrefixCache()
    prefix_cache.put({"tokens": [1, 2]}, [1, 2])
    assert prefix_cache.lookup(None, [1, 2] * 80, 1, 8) == (None, 0)
