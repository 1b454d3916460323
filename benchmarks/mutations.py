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
from collections.abc import Iterator, Sequence
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
    tests: Sequence[str]


# FILE: its tests; then pairs of lines, as in a patch.
PATCHES = """
engine/step.py: tests/engine/test_step.py tests/engine/test_guards.py tests/objectives tests/engine
- jnp.isfinite(sums.objective) & jnp.isfinite(norm) & jnp.isfinite(update_norm)
+ jnp.isfinite(sums.objective) & jnp.isfinite(norm)
- state.guard.skipped + jnp.where(applies, 0, 1)
+ state.guard.skipped + jnp.where(applies, 1, 0)
- phase.objective.update_slot(sums.slot, compute, count + 1)
+ phase.objective.update_slot(sums.slot, compute, count)
- jnp.maximum(weight, 1.0) for name
+ weight for name
- key=jax.random.fold_in(key, number))
+ key=key)
- position = state.guard.updates if pace
+ position = state.step if pace
engine/step.py: tests/engine/test_own_rules.py
- norm = optax.global_norm(gradient)
+ norm = optax.global_norm(sums.gradient)
- finite &= jnp.all(jnp.isfinite(leaf))
+ finite |= jnp.all(jnp.isfinite(leaf))
core/parameters.py: tests/core/test_parameters.py tests/optim/test_own_rules.py
- -self.size * jnp.sign(g)
+ -self.size * g
core/precision.py: tests/core/test_parameters.py
- return replace(rule, params=sum_dtype(rule.params), compute=sum_dtype(rule.compute))
+ return rule
optim/groups.py: tests/optim/test_own_rules.py
- moved, after = optimizer.update(others(updates), state
+ moved, after = optimizer.update(updates, state
engine/accumulate.py: tests/engine/test_step.py tests/engine
- sum_ + g.astype(sum_.dtype)
+ (sum_.astype(g.dtype) + g).astype(sum_.dtype)
engine/entry.py: tests/engine/test_entry.py tests/engine
- if self.phase.objective == self.previous.objective and not
+ if not
- guard=UpdateCounts(updates=jnp.zeros((), jnp.int32), skipped=jnp.asarray(before.skipped, jnp.int32))
+ guard=UpdateCounts(updates=jnp.zeros((), jnp.int32), skipped=jnp.zeros((), jnp.int32))
engine/control.py: tests/engine/test_control.py tests/engine
- effective=step + MAX_IN_FLIGHT)
+ effective=step + MAX_IN_FLIGHT + 1)
engine/phase_runner.py: tests/engine
- self.num_skipped = outcome.last - self.resumed.cursor.step
+ self.num_skipped = outcome.first - self.resumed.cursor.step
engine/checkpoint/policy.py: tests/engine/checkpoint
- if rule.until is None or step <= rule.until:
+ if rule.until is None or step < rule.until:
models/chunked_loss.py: tests/models/test_loss.py tests/models
- gradient_CV *= 1 - (logits_CV / loss.soft_cap) ** 2
+ gradient_CV *= 1 - (logits_CV / loss.soft_cap)
- (self.first_C < num_local) & (self.first_C < ids)
+ (self.first_C < num_local) & (self.first_C <= ids)
- jnp.where(m_C == 0, 0.0, m_C * a)
+ m_C * a
- & (self.y_C < self.sharding.vocab_size)
+
- x_BSD.shape[-1])[:num_tokens].reshape(x_BSD.shape)
+ x_BSD.shape[-1])[-num_tokens:].reshape(x_BSD.shape)
models/layers.py: tests/objectives/test_neftune.py tests/models
- lengths_BS = jax.vmap(lambda ids: jnp.bincount(ids, length=Pos.size + 1)[ids])(ids_BS)
+ lengths_BS = jnp.full(ids_BS.shape, Pos.size)
models/mixers/delta_rule.py: tests/models/test_delta_rule.py tests/models/test_mixers.py
- jnp.exp(jnp.where(same[:, :, None, None], between, -jnp.inf))
+ jnp.exp(between)
- unpadded(tokens.segments, before_B), "edge")
+ unpadded(tokens.segments, before_B))
models/mixers/gated_delta_net.py: tests/models/test_gated_delta_net.py tests/models/test_mixers.py
- jnp.where(same, part * conv[..., tap].astype(jnp.float32), 0)
+ part * conv[..., tap].astype(jnp.float32)
models/decoders/mtp.py: tests/models/test_mtp.py tests/interop/test_mtp.py
- hax.where(has_next, following(batch.loss_mask, batch.order), 0.0)
+ following(batch.loss_mask, batch.order)
- segment_ids.array * (segment_ids.array == after.array)
+ segment_ids.array * (after.array != 0)
- (embed_norm(embedded), hidden_norm(hidden))
+ (hidden_norm(hidden), embed_norm(embedded))
models/routing.py: tests/models/test_routing.py
- jnp.take_along_axis(scores_BSE, ids_BSK, axis=-1)
+ jnp.take_along_axis(chooses_BSE, ids_BSK, axis=-1)
- others=-jnp.inf)
+ others=0.0)
- load_E * load_E.size - jnp.sum(load_E)
+ load_E
- (segment_ids.array != 0).astype(jnp.float32), segment_ids.axes)
+ jnp.ones(segment_ids.array.shape, jnp.float32), segment_ids.axes)
models/rope.py: tests/interop/test_longrope.py tests/models/test_configs.py tests/interop tests/models
- return unscaled * (smooth + (1 - smooth) / self.factor)
+ return unscaled * (1 - smooth + smooth / self.factor)
- extension_BT = jnp.maximum(places.lengths() / self.original_max_position_embeddings, 1.0)
+ extension_BT = places.lengths() / self.original_max_position_embeddings
data/mixture.py: tests/data/test_mixture.py tests/data
- ranks_before = self._before[stage] + block * counts
+ ranks_before = self._before[stage] + (block > 0) * counts
data/shuffle.py: tests/data/test_shuffle.py tests/data
- while (outside := values >= size).any():
+ if (outside := values >= size).any():
- number = epoch[selected] * (last + 1) + era[selected]
+ number = epoch[selected] + era[selected]
data/packing.py: tests/data/test_packing.py tests/data
- is_target &= (columns > self.seq_len - self._windows.stride) | (starts == 0)[:, None]
+ is_target &= (columns >= self.seq_len - self._windows.stride) | (starts == 0)[:, None]
data/batch.py: tests/data/test_packing.py tests/data
- positions - np.maximum.accumulate(np.where(is_first, positions, 0), axis=-1)
+ positions
optim/schedules.py: tests/optim
- int(length * num_steps) if isinstance(length, float) and length <= 1
+ int(length * num_steps) if length <= 1
- low = min(segments[-1].last, spec.peak) if segments else 0.0
+ low = 0.0
optim/elementwise.py: tests/optim
- rate = self.weight_decay * scaled(schedule(state.count), controls or {}) / self.learning_rate
+ rate = self.weight_decay * schedule(state.count) / self.learning_rate
optim/bad_steps.py: tests/optim tests/engine
- start = jax.tree.map(lambda x: jnp.where(reset, jnp.zeros_like(x), x), window)
+ start = window
optim/clipping.py: tests/optim
- agrees = (update * gradient > 0) * 1.0
+ agrees = (update * gradient >= 0) * 1.0
systems/rl/advantages.py: tests/systems/rl
- jnp.where(counts & (lowest < highest), values - mean, 0.0)
+ jnp.where(counts, values - mean, 0.0)
systems/rl/policy_losses.py: tests/systems/rl
- jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio_NS), self.cap))
+ jnp.minimum(jnp.exp(log_ratio_NS), self.cap)
- jnp.where(advantage_N >= 0, self.positive_power, self.negative_power)
+ jnp.where(advantage_N > 0, self.positive_power, self.negative_power)
- jnp.any(mask > 0, axis=-1), dtype=jnp.float32)
+ mask.shape[0] * jnp.ones(()), dtype=jnp.float32)
controllers/reduce_on_plateau.py: tests/controllers
- if bad > config.patience:
+ if bad >= config.patience:
- cooldown, bad = cooldown - 1, 0
+ cooldown, bad = cooldown - 1, bad
objectives/dpo.py: tests/objectives
- is_shared = number <= hax.min(length, PAIR)
+ is_shared = number < hax.min(length, PAIR)
surgery/lora_layers.py: tests/surgery/test_initialisation.py tests/surgery
- products / count - jnp.outer(mean, mean)
+ products / count
surgery/drop_layers.py: tests/surgery/test_drop_layers.py tests/surgery
- jnp.argsort(jnp.asarray(sums["cosines"]), stable=True)
+ jnp.argsort(-jnp.asarray(sums["cosines"]), stable=True)
core/precision.py: tests/core tests/engine
- jnp.where(stats.finite & ~grows, good_steps, 0)
+ jnp.where(stats.finite, good_steps, 0)
"""


def mutations() -> Iterator[Mutation]:
    """Reads the patches."""
    file, right, tests = "", "", []
    for line in PATCHES.strip().splitlines():
        if line.startswith("- "):
            right = line[2:]
        elif line.startswith("+"):
            yield Mutation(file, right, line[2:], tests)
        else:
            file, _, names = line.partition(": ")
            tests = names.split()


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
        for suite, tests in itertools.product(SUITES, mutation.tests):
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
    known = list(mutations())
    numbers = [int(number) for number in arguments.only.split(",")] if arguments.only else range(len(known))
    caught = dict.fromkeys(SUITES, 0)
    for number in numbers:
        mutation = known[number]
        found = caught_by(arguments.tree.resolve(), mutation)
        if found is not None:
            caught[found[0]] += 1
        by = "NOT CAUGHT" if found is None else f"{found[1]} ({found[0]})"
        print(f"{number:2} {mutation.file}: {mutation.right} -> {mutation.wrong}: {by}", flush=True)
    counts = ", ".join(f"{count} by the {suite} tests" for suite, count in caught.items())
    print(f"of {len(numbers)} mutations, {counts}")


if __name__ == "__main__":
    main()
