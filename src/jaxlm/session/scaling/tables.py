"""The tables of a scaling study, as Markdown."""

from collections.abc import Collection, Iterable, Sequence

from jaxlm.session.scaling.law import PowerLaw, ScalingLaw
from jaxlm.session.scaling.members import Member, MemberResult


def plan_table(members: Sequence[Member], finished: Collection[str]) -> str:
    """What the study trains. Args: finished: names of the members that need no training."""
    return _table(
        ("run", "depth", "FLOPs", "scaling parameters", "tokens", "steps", ""),
        (
            (
                member.name,
                str(member.depth),
                f"{member.budget:g}",
                f"{member.size.num_parameters:,}",
                f"{member.size.num_tokens:,}",
                f"{member.size.num_steps:,}",
                "finished" if member.name in finished else "",
            )
            for member in members
        ),
    )


def member_table(results: Sequence[MemberResult]) -> str:
    """Lists what each member reached."""
    metric = results[0].metric if results else "loss"
    return _table(
        ("FLOPs", "depth", "scaling parameters N", "tokens D", "D / N", metric),
        (
            (
                f"{one.budget:g}",
                str(one.depth),
                f"{one.num_parameters:,}",
                f"{one.num_tokens:,}",
                f"{one.num_tokens / one.num_parameters:.2f}",
                f"{one.value:.4f}",
            )
            for one in results
        ),
    )


def law_table(law: ScalingLaw) -> str:
    """Lists the minimum of each budget, and the power laws."""
    rows = []
    for p in law.parabolas:
        if p.num_parameters is None or p.num_tokens is None or p.loss is None:
            rows.append((f"{p.budget:g}", p.problem, "", "", ""))
        else:
            ratio = p.num_tokens / p.num_parameters
            rows.append(
                (f"{p.budget:g}", f"{p.num_parameters:.4g}", f"{p.num_tokens:.4g}", f"{ratio:.2f}", f"{p.loss:.4f}")
            )
    table = _table(("FLOPs C", "best N", "best D", "D / N", "loss"), rows)
    if law.parameters is None or law.tokens is None:
        return f"{table}\n\nNo scaling law: {law.problem}."
    return f"{table}\n\n{_formula('N_opt', law.parameters)}, {_formula('D_opt', law.tokens)}"


def _formula(name: str, law: PowerLaw) -> str:
    return f"{name} = {law.factor:.4g} x C^{law.exponent:.4f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
