"""Every field of the configuration has the effect that the tables in tests/fields state."""

import pytest

from tests.fields import model_table, preset_table, run_table
from tests.fields.proofs import Change, Entry, Outcome, Section, ShownIn, assert_test_exists, outcome_of
from tests.fields.trees import BASES, all_fields, at_path, merged

TABLES = (model_table.TABLE, run_table.TABLE, preset_table.TABLE)
ENTRIES: dict[tuple[str, str], Entry] = {
    (base, path): entry for table in TABLES for base, fields in table.items() for path, entry in fields.items()
}
QUICK = ("llama", "gpt2", "flax")
SLOW_BASES = ("distill", "watch", "remat", "rope linear", "rope llama3", "rope longrope", "rope yarn")


def test_every_field_is_listed():
    assert set(ENTRIES) == set(all_fields())
    assert len(ENTRIES) == sum(len(fields) for table in TABLES for fields in table.values())  # none is listed twice


def test_the_fields_of_each_section_are_listed():
    sections = [path for (_, path), entry in ENTRIES.items() if isinstance(entry, Section)]
    assert [s for s in sections if not any(path.startswith(f"{s}.") for _, path in ENTRIES)] == []


def changes() -> list:
    """The fields with a change. Those of Llama's relatives, scaled RoPE, distillation and watching are slow tests."""
    quick = lambda base: base == "dial" or (BASES[base]["model"]["type"] in QUICK and base not in SLOW_BASES)  # noqa: E731
    return [
        pytest.param(base, path, marks=() if quick(base) else pytest.mark.slow)
        for (base, path), entry in ENTRIES.items()
        if isinstance(entry, Change)
    ]


@pytest.mark.parametrize(("base", "path"), changes())
def test_field(base, path):
    entry = ENTRIES[base, path]
    assert isinstance(entry, Change)
    before = merged(BASES[base], entry.also)
    entry.proof.check(outcome_of(before), Outcome(at_path(before, path, entry.value)))


@pytest.mark.parametrize("test", sorted({entry.test for entry in ENTRIES.values() if isinstance(entry, ShownIn)}))
def test_tests_named_as_proofs_exist(test):
    assert_test_exists(test)
