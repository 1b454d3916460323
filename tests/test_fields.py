"""Every field of the configuration has the effect that the tables in tests/fields state."""

from collections import Counter

import pytest

from jaxlm.models.base import ModelConfig
from tests.fields import model_table, orchestration_table, preset_table, run_table, trees
from tests.fields.proofs import RANDOM_BITS, Change, Entry, Outcome, Section, ShownIn, assert_test_exists, outcome_of
from tests.fields.trees import BASES, all_fields, at_path, merged

TABLES = (model_table.TABLE, run_table.TABLE, preset_table.TABLE, orchestration_table.TABLE)
ENTRIES: dict[tuple[str, str], Entry] = {
    (base, path): entry for table in TABLES for base, fields in table.items() for path, entry in fields.items()
}
QUICK = ("llama", "dial")


def test_every_field_is_listed():
    assert set(ENTRIES) == set(all_fields())
    assert len(ENTRIES) == sum(len(fields) for table in TABLES for fields in table.values())  # none is listed twice


def test_the_fields_of_each_section_are_listed():
    sections = [path for (_, path), entry in ENTRIES.items() if isinstance(entry, Section)]
    assert [s for s in sections if not any(path.startswith(f"{s}.") for _, path in ENTRIES)] == []


def shares_a_program(base: str, entry: Change) -> bool:
    """Whether no other field of the base changes what proves the effect, so that all such fields are changed at once."""
    return not base.startswith("rope ") and not entry.also and not getattr(entry.proof, "alone", True)


def declared_in(base: str, path: str) -> type | None:
    """The class that declares a key of a model, whose subclasses inherit it."""
    model, name = (
        ModelConfig.get_choice_class(BASES[base].get("model", {}).get("type", "llama")),
        path.removeprefix("model."),
    )
    classes = [kind for kind in model.__mro__ if name in vars(kind).get("__annotations__", {})]
    return classes[-1] if classes and path.startswith("model.") else None


def changes() -> list:
    """(base, fields to change at once).

    Those of other bases than `QUICK` are slow. What several models inherit, CI changes in the first.
    """
    cases: dict[str, tuple[str, list[str], bool]] = {}
    shown: Counter[tuple[str, bool, str]] = Counter()
    first: dict[tuple[type, str], str] = {}
    for (base, path), entry in ENTRIES.items():
        if isinstance(entry, Change):
            owner = declared_in(base, path)
            is_first = owner is None or first.setdefault((owner, path), base) == base
            case = path
            if shares_a_program(base, entry):
                shown[base, is_first, repr(entry.proof)] += 1  # two fields with the same effect have two programs
                kind = "effects of their own" if is_first else "inherited effects"
                case = f"{kind} {shown[base, is_first, repr(entry.proof)]}"
            cases.setdefault(f"{base}-{case}", (base, [], is_first))[1].append(path)
    return [
        pytest.param(
            base, paths, id=name, marks=() if base in QUICK else pytest.mark.slow if is_first else pytest.mark.soak
        )
        for name, (base, paths, is_first) in cases.items()
    ]


@pytest.mark.parametrize(("base", "paths"), changes())
def test_field(base, paths):
    entries = {path: entry for path in paths if isinstance(entry := ENTRIES[base, path], Change)}
    effects = [entry.proof for entry in entries.values()]
    assert len({repr(effect) for effect in effects}) == len(paths)
    also = entries[paths[0]].also
    before = after = merged(BASES[base], also)
    for path, entry in entries.items():
        after = at_path(after, path, entry.value)
    outcome = Outcome(after)
    wrong = {}
    for path, entry in entries.items():
        try:
            entry.proof.check(outcome_of(before), outcome)
        except AssertionError as error:
            wrong[path] = str(error)
    assert wrong == {}


def sampled(base: dict) -> Outcome:
    """A run that trains the base's model and surgeries on responses that it samples."""
    grpo = {"type": "grpo", "old_policy": "rollout", "kl": None}
    rewards = [{"type": "format", "pattern": "[0-9]+"}]
    rollouts = {"type": "rollouts", "train_urls": ["p.jsonl"], "max_new_tokens": 8, "rewards": rewards}
    return Outcome(
        {key: base[key] for key in ("model", "trainer", "phases") if key in base}
        | {"objective": grpo, "data": rollouts}
    )


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in trees.MODELS]
)
def test_a_sampler_computes_what_a_step_of_any_model_computes(model):
    assert sampled(BASES[model]).error == ""


MAKES_RANDOM = {
    key: entry.value for key, entry in ENTRIES.items() if isinstance(entry, Change) and entry.proof is RANDOM_BITS
}


@pytest.mark.slow
@pytest.mark.parametrize(("base", "path"), [*MAKES_RANDOM, ("flax", "model.kwargs.dropout")])
def test_a_key_that_makes_training_random_is_refused_beside_a_sampler(base, path):
    assert sampled(BASES[base]).error == ""
    changed = sampled(at_path(BASES[base], path, MAKES_RANDOM.get((base, path), 0.5)))
    assert "In training, it is random (dropout)" in changed.error


def test_tests_named_as_proofs_exist():
    for entry in ENTRIES.values():
        if isinstance(entry, ShownIn):
            assert_test_exists(entry.test)
