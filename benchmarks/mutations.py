"""Counts which mutations of the kernel the default tests catch, and which only the slow ones do.

    python benchmarks/mutations.py [--tree FOLDER] [--only NUMBER,NUMBER]

Each mutation replaces one expression of `src/jaxlm` by a wrong one that still runs. The default tests of the folders that it
belongs to run until one of them fails, and if none does, the slow ones. Prints a line for each mutation, with the test that
caught it, and the counts. To compare two commits, check each of them out (`git worktree add`), and give the folders with
`--tree`.

Takes an hour or more on two cores; `--only` takes some of them.
"""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """A wrong expression in the place of a right one.

    Attributes:
        file: below `src/jaxlm`.
        right: occurs once in the file.
        tests: files and folders, tried in this order.
    """

    file: str
    right: str
    wrong: str
    tests: str


MUTATIONS = (
    Mutation(
        "engine/step.py",
        "jnp.isfinite(sums.objective) & jnp.isfinite(norm) & jnp.isfinite(update_norm)",
        "jnp.isfinite(sums.objective) & jnp.isfinite(norm)",
        "tests/engine/test_step.py tests/engine/test_guards.py tests/engine",
    ),
    Mutation(
        "engine/step.py",
        "state.guard.skipped + jnp.where(applies, 0, 1)",
        "state.guard.skipped + jnp.where(applies, 1, 0)",
        "tests/engine/test_step.py tests/engine/test_guards.py tests/engine",
    ),
    Mutation(
        "engine/step.py",
        "phase.objective.update_slot(sums.slot, compute, count + 1)",
        "phase.objective.update_slot(sums.slot, compute, count)",
        "tests/engine/test_step.py tests/engine/test_guards.py tests/objectives tests/engine",
    ),
    Mutation(
        "engine/step.py",
        "jnp.maximum(weight, 1.0) for name",
        "weight for name",
        "tests/engine/test_step.py tests/engine/test_guards.py tests/engine tests/objectives",
    ),
    Mutation(
        "engine/step.py",
        "key=jax.random.fold_in(key, number))",
        "key=key)",
        "tests/engine/test_step.py tests/engine/test_guards.py tests/engine",
    ),
    Mutation(
        "engine/step.py",
        "position = state.guard.updates if pace",
        "position = state.step if pace",
        "tests/engine/test_step.py tests/engine/test_guards.py tests/engine",
    ),
    Mutation(
        "engine/accumulate.py",
        "sum_ + g.astype(sum_.dtype)",
        "(sum_.astype(g.dtype) + g).astype(sum_.dtype)",
        "tests/engine/test_step.py tests/engine",
    ),
    Mutation(
        "engine/entry.py",
        "if self.phase.objective == self.previous.objective and not",
        "if not",
        "tests/engine/test_entry.py tests/engine",
    ),
    Mutation(
        "engine/entry.py",
        "guard=UpdateCounts(updates=jnp.zeros((), jnp.int32), skipped=jnp.asarray(before.skipped, jnp.int32))",
        "guard=UpdateCounts(updates=jnp.zeros((), jnp.int32), skipped=jnp.zeros((), jnp.int32))",
        "tests/engine/test_entry.py tests/engine",
    ),
    Mutation(
        "engine/control.py",
        "done.number + MAX_IN_FLIGHT - 1",
        "done.number + MAX_IN_FLIGHT",
        "tests/engine/test_control.py tests/engine",
    ),
    Mutation(
        "engine/phase_runner.py",
        "self.num_skipped = outcome.last - self.resumed.cursor.step",
        "self.num_skipped = outcome.first - self.resumed.cursor.step",
        "tests/engine",
    ),
    Mutation(
        "engine/checkpoint/policy.py",
        "if rule.until is None or step <= rule.until:",
        "if rule.until is None or step < rule.until:",
        "tests/engine/checkpoint",
    ),
    Mutation(
        "models/chunked_loss.py",
        "gradient_CV *= 1 - (logits_CV / loss.soft_cap) ** 2",
        "gradient_CV *= 1 - (logits_CV / loss.soft_cap)",
        "tests/models/test_loss.py tests/models",
    ),
    Mutation(
        "models/chunked_loss.py",
        "(first_C < num_local) & (first_C < ids)",
        "(first_C < num_local) & (first_C <= ids)",
        "tests/models/test_loss.py tests/models",
    ),
    Mutation(
        "models/chunked_loss.py",
        "jnp.where(m_C == 0, 0.0, m_C * a)",
        "m_C * a",
        "tests/models/test_loss.py tests/models",
    ),
    Mutation(
        "models/chunked_loss.py",
        "& (y_C < sharding.vocab_size)",
        "",
        "tests/models/test_loss.py tests/models",
    ),
    Mutation(
        "models/chunked_loss.py",
        "x_BSD.shape[-1])[:num_tokens].reshape(x_BSD.shape)",
        "x_BSD.shape[-1])[-num_tokens:].reshape(x_BSD.shape)",
        "tests/models/test_loss.py tests/models",
    ),
    Mutation(
        "models/layers.py",
        "lengths_BS = jax.vmap(lambda ids: jnp.bincount(ids, length=Pos.size + 1)[ids])(ids_BS)",
        "lengths_BS = jnp.full(ids_BS.shape, Pos.size)",
        "tests/objectives/test_neftune.py tests/models",
    ),
    Mutation(
        "models/rope.py",
        "return unscaled * (smooth + (1 - smooth) / self.factor)",
        "return unscaled * (1 - smooth + smooth / self.factor)",
        "tests/interop/test_longrope.py tests/models/test_configs.py tests/interop tests/models",
    ),
    Mutation(
        "models/rope.py",
        "extension_BT = jnp.maximum(places.lengths() / self.original_max_position_embeddings, 1.0)",
        "extension_BT = places.lengths() / self.original_max_position_embeddings",
        "tests/interop/test_longrope.py tests/models/test_configs.py tests/interop tests/models",
    ),
    Mutation(
        "data/mixture.py",
        "ranks_before = self._before[stage] + block * counts",
        "ranks_before = self._before[stage] + (block > 0) * counts",
        "tests/data/test_mixture.py tests/data",
    ),
    Mutation(
        "data/shuffle.py",
        "while (outside := values >= size).any():",
        "if (outside := values >= size).any():",
        "tests/data/test_shuffle.py tests/data",
    ),
    Mutation(
        "data/shuffle.py",
        "number = epoch[selected] * (last + 1) + era[selected]",
        "number = epoch[selected] + era[selected]",
        "tests/data",
    ),
    Mutation(
        "data/packing.py",
        "is_target &= (columns > self.seq_len - self._windows.stride) | (starts == 0)[:, None]",
        "is_target &= (columns >= self.seq_len - self._windows.stride) | (starts == 0)[:, None]",
        "tests/data/test_packing.py tests/data",
    ),
    Mutation(
        "data/packing.py",
        "(columns[inputs] - segment_start) * inside[:, inputs]",
        "columns[inputs] * inside[:, inputs]",
        "tests/data/test_packing.py tests/data",
    ),
    Mutation(
        "optim/schedules.py",
        "int(length * num_steps) if isinstance(length, float) and length <= 1",
        "int(length * num_steps) if length <= 1",
        "tests/optim",
    ),
    Mutation(
        "optim/schedules.py",
        "low = min(segments[-1].last, spec.peak) if segments else 0.0",
        "low = 0.0",
        "tests/optim",
    ),
    Mutation(
        "optim/elementwise.py",
        "rate = self.weight_decay * scaled(schedule(state.count), controls or {}) / self.learning_rate",
        "rate = self.weight_decay * schedule(state.count) / self.learning_rate",
        "tests/optim",
    ),
    Mutation(
        "optim/bad_steps.py",
        "start = jax.tree.map(lambda x: jnp.where(reset, jnp.zeros_like(x), x), window)",
        "start = window",
        "tests/optim tests/engine",
    ),
    Mutation(
        "optim/clipping.py",
        "agrees = (update * gradient > 0) * 1.0",
        "agrees = (update * gradient >= 0) * 1.0",
        "tests/optim",
    ),
    Mutation(
        "systems/rl/advantages.py",
        "jnp.where(counts & (lowest < highest), values - mean, 0.0)",
        "jnp.where(counts, values - mean, 0.0)",
        "tests/objectives",
    ),
    Mutation(
        "systems/rl/policy_losses.py",
        "jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio_NS), self.cap))",
        "jnp.minimum(jnp.exp(log_ratio_NS), self.cap)",
        "tests/objectives",
    ),
    Mutation(
        "systems/rl/policy_losses.py",
        "jnp.where(advantage_N >= 0, self.positive_power, self.negative_power)",
        "jnp.where(advantage_N > 0, self.positive_power, self.negative_power)",
        "tests/objectives",
    ),
    Mutation(
        "systems/rl/policy_losses.py",
        "jnp.any(mask > 0, axis=-1), dtype=jnp.float32)",
        "mask.shape[0] * jnp.ones(()), dtype=jnp.float32)",
        "tests/objectives",
    ),
    Mutation(
        "controllers/reduce_on_plateau.py",
        "if bad > config.patience:",
        "if bad >= config.patience:",
        "tests/controllers",
    ),
    Mutation(
        "controllers/reduce_on_plateau.py",
        "cooldown, bad = cooldown - 1, 0",
        "cooldown, bad = cooldown - 1, bad",
        "tests/controllers",
    ),
    Mutation(
        "objectives/dpo.py",
        "is_shared = number <= hax.min(length, PAIR)",
        "is_shared = number < hax.min(length, PAIR)",
        "tests/objectives",
    ),
    Mutation(
        "surgery/lora_layers.py",
        "products / count - jnp.outer(mean, mean)",
        "products / count",
        "tests/surgery/test_initialisation.py tests/surgery",
    ),
    Mutation(
        "surgery/drop_layers.py",
        'jnp.argsort(jnp.asarray(sums["cosines"]), stable=True)',
        'jnp.argsort(-jnp.asarray(sums["cosines"]), stable=True)',
        "tests/surgery/test_drop_layers.py tests/surgery",
    ),
    Mutation(
        "core/precision.py",
        "jnp.where(stats.finite & ~grows, good_steps, 0)",
        "jnp.where(stats.finite, good_steps, 0)",
        "tests/core tests/engine",
    ),
)


SUITES = {"default": "not slow and not soak", "slow": "slow and not soak"}


def caught_by(tree: Path, mutation: Mutation) -> tuple[str, str] | None:
    """The suite and the test that fails with the mutation; None if all tests pass."""
    path = tree / "src/jaxlm" / mutation.file
    original = path.read_text()
    if original.count(mutation.right) != 1:
        raise SystemExit(f"{path}: {mutation.right!r} occurs {original.count(mutation.right)} times, expected once")
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        path.write_text(original.replace(mutation.right, mutation.wrong))
        for suite, tests in itertools.product(SUITES, mutation.tests.split()):
            options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-m", SUITES[suite], tests]
            command = [sys.executable, "-m", "pytest", *options]
            run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
            lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if lines:
                return suite, lines[0].split(" - ")[0].split()[1]
            if run.returncode not in (0, 5):  # 5: no test was selected
                raise SystemExit(run.stdout + run.stderr)
    finally:
        path.write_text(original)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to mutate; its files are restored")
    parser.add_argument("--only", help="numbers of mutations, with commas between them")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.only.split(",")] if arguments.only else range(len(MUTATIONS))
    caught = dict.fromkeys(SUITES, 0)
    for number in numbers:
        mutation = MUTATIONS[number]
        found = caught_by(arguments.tree.resolve(), mutation)
        if found is not None:
            caught[found[0]] += 1
        by = "NOT CAUGHT" if found is None else f"{found[1]} ({found[0]})"
        print(f"{number:2} {mutation.file}: {mutation.right} -> {mutation.wrong}: {by}", flush=True)
    counts = ", ".join(f"{count} by the {suite} tests" for suite, count in caught.items())
    print(f"of {len(numbers)} mutations, {counts}")


if __name__ == "__main__":
    main()
