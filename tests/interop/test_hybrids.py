"""Hybrid families against transformers, with two repetitions of the pattern and texts longer than a chunk."""

import copy

import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.models.inference.generate import generate
from tests.interop import cases
from tests.interop.cases import CASES, VOCAB, inputs_of, logits_of
from tests.interop.test_families import as_ours, imported, loss_and_gradient

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTH = 150
SIZES = {"hidden_size": 64, "num_hidden_layers": 8, "max_position_embeddings": 256}
SUMS = ("A_log", "dt_bias")  # over all tokens, of terms that cancel


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5",
        "olmo_hybrid",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_moe", "qwen3_next")),
    ],
)
def pair(request, tmp_path_factory):
    """transformers' model with weights of moderate size, and ours."""
    kind, options = CASES[request.param]
    CASES["deep"] = (kind, options | SIZES)
    try:
        theirs = cases.reference.__wrapped__("deep")
    finally:
        del CASES["deep"]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.ndim == 1 else 0.06))
    folder = tmp_path_factory.mktemp("deep")
    theirs.save_pretrained(folder)
    opened, model = imported(folder)
    return request.param, theirs, opened, model


def text(rows: int = 2, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, size=(rows, length))


@pytest.mark.slow
def test_logits(pair):
    _, theirs, _, model = pair
    with torch.no_grad():
        expected = theirs(torch.tensor(text())).logits.numpy()
    np.testing.assert_allclose(logits_of(model, inputs_of(text())), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gradients(pair):
    _, theirs, opened, model = pair
    theirs = copy.deepcopy(theirs)
    loss, gradient = loss_and_gradient(model, inputs_of(text()))
    expected = theirs(torch.tensor(text()), labels=torch.tensor(text())).loss
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    wanted = dict(tree.leaves(as_ours(theirs, opened, {key: p.grad for key, p in theirs.named_parameters()})))
    for path, leaf in tree.leaves(gradient):
        reference = np.asarray(wanted[path].array)
        tolerance = 1e-4 if path.endswith(SUMS) else 1e-5
        np.testing.assert_allclose(
            leaf.array, reference, rtol=0, atol=tolerance * np.abs(reference).max(), err_msg=path
        )


@pytest.mark.soak
def test_greedy_text(pair):
    _, theirs, _, model = pair
    prompt = torch.tensor(text(2, 70))
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(prompt)  # token 0 is a token like others
    with torch.no_grad():
        expected = theirs.generate(prompt, **options)[:, 70:].tolist()
    assert generate(model, prompt.tolist(), max_new_tokens=64, temperature=0.0) == expected
    # Of a batch with prompts of several lengths, each is continued as alone.
    prompts = [row[:length] for row, length in zip(prompt.tolist(), (70, 9), strict=True)]
    alone = [generate(model, [one], max_new_tokens=16, temperature=0.0)[0] for one in prompts]
    assert generate(model, prompts, max_new_tokens=16, temperature=0.0) == alone
