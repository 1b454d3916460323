"""Greedy text of families with recurrent layers or experts: with caches, without, and of transformers."""

import numpy as np
import pytest

from jaxlm.models.inference.generate import GenerationConfig, generate_tokens
from jaxlm.models.inference.unstacked import Generator
from tests.interop import cases
from tests.interop.cases import CASES, inputs_of, logits_of, tokens
from tests.interop.test_families import imported
from tests.tiers import one_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

LENGTHS, NEW_TOKENS = (12, 5), 64
FAMILIES = (
    *("qwen3_5_moe", "gpt_oss", "qwen3_5", "qwen3_next", "olmo_hybrid"),
    *("glm4_moe", "glm4_moe_lite", "minimax_m2", "olmoe", "granitemoe"),
)


def without_cache(model, prompts):
    """The most likely token after all tokens so far, again and again. Only real tokens precede the one that is read."""
    ids, rows = np.zeros((len(prompts), max(LENGTHS) + NEW_TOKENS), np.int32), np.arange(len(prompts))
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    for step in range(NEW_TOKENS):
        ends = np.asarray(LENGTHS) + step
        ids[rows, ends] = np.asarray(logits_of(model, inputs_of(ids)))[rows, ends - 1].argmax(axis=-1)
    return [row[n : n + NEW_TOKENS].tolist() for row, n in zip(ids, LENGTHS, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(FAMILIES, but=2))
def test_greedy_text(name, tmp_path, monkeypatch):
    kind, options = CASES[name]
    monkeypatch.setitem(CASES, "longer", (kind, options | {"max_position_embeddings": max(LENGTHS) + NEW_TOKENS}))
    theirs = cases.reference.__wrapped__("longer")
    theirs.save_pretrained(tmp_path)
    _, model = imported(tmp_path)
    prompts = [row[:length] for row, length in zip(tokens().tolist(), LENGTHS, strict=True)]
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for prompt in map(torch.tensor, prompts):
        with torch.no_grad():
            found = theirs.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **greedy)
        expected.append(found[0, len(prompt) :].tolist())
    assert without_cache(model, prompts) == expected
    config, separate = GenerationConfig(NEW_TOKENS, temperature=0.0), Generator.of(model)
    assert separate.step_model is not model
    for generator in (separate, Generator(model, model)):
        assert generate_tokens(generator, prompts, config) == expected
