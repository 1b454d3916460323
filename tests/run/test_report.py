"""The report at the end of a run."""

import gzip

from jaxlm.report import compressors


def test_compressors_are_measured_on_all_texts_as_one_stream():
    texts = ["one text\n" * 50, "another\n" * 70]
    raw = "".join(texts).encode()
    rows = dict(compressors(texts))
    assert rows["  gzip -9 on all text"] == f"{8 * len(gzip.compress(raw, 9)) / len(raw):.4f} ({len(raw):,} bytes)"


def test_a_last_phase_without_validation_text_has_no_compressors():
    assert compressors([]) == []
