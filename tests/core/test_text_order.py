"""Tokens in another order than that of the text, against numpy on rows of text."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.values.permutation import following, in_row_order, in_text_order, previous, text_index

LENGTH, SHAPE = 7, (2, 3, 7)
AXES = (hax.Axis("batch", 2), hax.Axis("pair", 3), hax.Axis("position", LENGTH))
ORDER = np.argsort(np.random.default_rng(0).random(SHAPE), axis=-1).astype(np.int32)
FEATURES = hax.Axis("features", 4)
TEXT = np.random.default_rng(1).normal(size=(*SHAPE, 4)).astype(np.float32)
ROW = np.take_along_axis(TEXT, ORDER[..., None], axis=2)


def named(array: np.ndarray, *more: hax.Axis) -> hax.NamedArray:
    return hax.named(jnp.asarray(array), (*AXES, *more))


@pytest.mark.parametrize(
    "places", [("batch", "pair", "position", "features"), ("features", "pair", "position", "batch")]
)
def test_tokens_change_places_and_axes_stay(places):
    text, row = (named(a, FEATURES).rearrange(places) for a in (TEXT, ROW))
    for found, expected in ((in_row_order(text, named(ORDER)), row), (in_text_order(row, named(ORDER)), text)):
        assert found.axes == expected.axes
        np.testing.assert_array_equal(found.array, expected.array)
    assert in_text_order(row, None) is row
    assert in_row_order(row, None) is row


def test_the_index_of_each_token():
    np.testing.assert_array_equal(text_index(named(ROW, FEATURES), named(ORDER)).array, ORDER)
    np.testing.assert_array_equal(text_index(named(ROW, FEATURES), None).array, np.arange(LENGTH))


@pytest.mark.parametrize("first", [0.0, 5.0, "array"])
def test_the_token_before(first):
    given = first
    if first == "array":
        first = np.random.default_rng(2).normal(size=(2, 3, 1, 4)).astype(np.float32)
        given = hax.named(jnp.asarray(first), (*AXES[:2], AXES[2].resize(1), FEATURES))
    head = np.broadcast_to(np.asarray(first, np.float32), (2, 3, 1, 4))
    expected = np.concatenate([head, TEXT[:, :, :-1]], axis=2)
    np.testing.assert_array_equal(previous(named(TEXT, FEATURES), None, given).array, expected)
    found = previous(named(ROW, FEATURES), named(ORDER), given)
    np.testing.assert_array_equal(in_text_order(found, named(ORDER)).array, expected)
    assert found.axes == (*AXES, FEATURES)


def test_the_token_after():
    expected = np.concatenate([TEXT[:, :, 1:], np.zeros((2, 3, 1, 4), np.float32)], axis=2)
    np.testing.assert_array_equal(following(named(TEXT, FEATURES), None).array, expected)
    found = following(named(ROW, FEATURES), named(ORDER))
    np.testing.assert_array_equal(in_text_order(found, named(ORDER)).array, expected)
    assert found.axes == (*AXES, FEATURES)
