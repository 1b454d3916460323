"""The section `data`, and what `model` says of the tokenizer."""

import contextlib
from typing import Any

from jaxlm.core.safe_io import map_array
from jaxlm.interop.section import Section
from jaxlm.interop.stackwise.objective import MASK, Objective
from jaxlm.interop.text_path import TOKENS, put_text
from jaxlm.interop.translated import Translated

_END_OF_TEXT = "<|endoftext|>"
_SEQ_LEN = 512


def put_data(model: Section, data: Section, training: Section, objective: Objective, out: Translated) -> int | None:
    """Writes where text comes from, the tokenizer and the length of sequences.

    Returns:
        The number of sequences; None if it cannot be told from the size of a file.
    """
    seq_len = _length(data, training, out)
    path = data.take("dataset_path")
    if path is not None:
        put_text(str(path), data, "dataset_path", out)
    data.ignore(
        "use_dummy_data",
        "no effect: nothing is learned from random tokens. Set data.dataset_path, or --data.train_urls"
        if path is None
        else "no effect: the text of dataset_path is read",
    )
    data.ignore("num_samples", "no effect: it is the number of random sequences of use_dummy_data")
    if objective.name == "custom":
        out.put("data.type", "labeled", data, "dataset_path")
    _tokenizer(model, data, objective, out)
    data.ignore("padding", "no effect: documents are packed into full sequences, and objectives leave padding out")
    data.ignore("num_workers", "no effect: a thread of each process prepares the next batches")
    data.ignore("pin_memory", "no effect: batches are copied to the devices while the step before runs")
    if (shuffles := data.choice("shuffle", (True, False))) is not None:
        out.put("data.shuffle", shuffles, data, "shuffle")
    if (folder := training.take("cache_dir")) is not None:
        out.put("data.cache_dir", folder, training, "cache_dir")
    if isinstance(path, str) and path.endswith(TOKENS) and isinstance(seq_len, int):
        with contextlib.suppress(OSError, ValueError):
            return map_array(path).size // seq_len
    return None


def _length(data: Section, training: Section, out: Translated) -> Any:
    seq_len, longest = training.take("seq_len"), data.take("max_length")
    if seq_len is None:
        seq_len = _SEQ_LEN if longest is None else longest
        out.put("model.seq_len", seq_len, data, "max_length")
        return seq_len
    if longest not in (None, seq_len):
        data.note(
            "max_length", f"no effect: sequences have training.seq_len ({seq_len}) tokens, of documents of any length"
        )
    out.put("model.seq_len", seq_len, training, "seq_len")
    return seq_len


def _tokenizer(model: Section, data: Section, objective: Objective, out: Translated) -> None:
    path, embedding = data.take("tokenizer_path"), model.section("tokenizer_embedding")
    family = embedding.take("family")
    embedding.ignore("embedding_option", "no effect: embeddings are new, and of the width d_model")
    embedding.ignore(
        "freeze_embeddings", "embeddings are new: they train with the first stack, and are frozen afterwards"
    )
    embedding.refuse("adapter_hidden_dim", "embeddings have the width of the model, so that nothing has to adapt them")
    embedding.done()
    if path is not None:
        out.put("data.tokenizer", path, data, "tokenizer_path")
    elif family is not None and not out.has("data.vocab_size"):
        out.put("data.tokenizer", family, embedding, "family")
    elif objective.hides_tokens:
        special = {"type": "bpe", "special_tokens": [_END_OF_TEXT, MASK]}
        out.put("data.tokenizer", special, data, "tokenizer_path")
    if family is not None and path is not None:
        embedding.note("family", "no effect beside data.tokenizer_path, which is the tokenizer")
    elif family is not None and out.has("data.vocab_size"):
        embedding.note("family", "no effect beside vocab_size: a tokenizer of that size is trained on the text")
