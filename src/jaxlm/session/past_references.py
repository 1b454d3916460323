"""References that a run no longer reads: only phases that it has left, or surgeries of phases that it has entered, did.

Their files may be gone. What identifies them is taken from the checkpoint instead.
"""

from dataclasses import replace

from jaxlm.core.runtime import from_main
from jaxlm.engine.checkpoint.manifest import Cursor
from jaxlm.plan.plan import Plan
from jaxlm.session.init_from import InitFrom, expected_cursor
from jaxlm.session.resume_checks import load_saved_run


def with_past_references(plan: Plan) -> Plan:
    """The plan, with the identities of the references that the run has probably left behind. All processes call this."""
    cursor = expected_cursor(plan)

    def identities() -> dict[str, dict[str, str]]:
        names = _past(plan, cursor)
        saved = load_saved_run(plan) if names else None
        return {name: dict({} if saved is None else saved.references.get(name, {})) for name in names}

    return replace(plan, past_refs=from_main(identities)) if plan.refs else plan


def read_again(plan: Plan, init_from: InitFrom) -> Plan:
    """The plan for where the run really goes on, which is earlier than expected if checkpoints are damaged."""
    past = _past(plan, None if init_from.state is None else init_from.state.cursor)
    return replace(plan, past_refs={name: known for name, known in plan.past_refs.items() if name in past})


def _past(plan: Plan, cursor: Cursor | None) -> list[str]:
    if cursor is None:
        return []
    ahead = plan.phases[cursor.phase :]
    evals = [one for one in plan.config.evals if any(one.runs_in(phase.name) for phase in ahead)]
    needed = {name for evaluation in evals for name in evaluation.references}
    needed |= {name for phase in ahead for name in phase.objective.references}
    needed |= {name for phase in ahead[1:] for name in phase.surgery_references}
    return [name for name in plan.refs if name not in needed]
