"""Completions to score."""

from jaxlm.core.values.logged import ScoredRows
from jaxlm.systems.rl.rewards.base import RewardContext

CONTEXT = RewardContext(decode=str, max_new_tokens=20, eos_ids=(0,))


def rows(*completions, lengths=None, **columns):
    count = len(completions)
    ids = [[1] * n for n in (lengths or [len(text) for text in completions])]
    columns = {name: value if isinstance(value, list) else [value] * count for name, value in columns.items()}
    places = [f"data.jsonl:{n + 1}" for n in range(count)]
    return ScoredRows(["prompt "] * count, list(completions), ids, [True] * count, columns, places)
