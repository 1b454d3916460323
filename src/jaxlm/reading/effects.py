"""What a changed key means for a run that resumes: its field says so (`log_dir: str = field("x", on_resume="harmless")`), or
that of a section around it.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, TypeVar, overload

from draccus.choice_types import CHOICE_TYPE_KEY

from jaxlm.reading.decode import is_choice

T = TypeVar("T")
Kind = Literal["harmless", "changes what follows", "refused"]


@dataclass(frozen=True)
class Effect:
    """Describes what a change does to a resumed run.

    Attributes:
        kind: `harmless` cannot change any number of the training.
        how: what is different from here on; empty if the key says it all.
    """

    kind: Kind
    how: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.how}" if self.how else self.kind


def follows(how: str) -> Effect:
    """The effect of a key that changes what follows."""
    return Effect("changes what follows", how)


HARMLESS = Effect("harmless")
ROUNDING = follows("float rounding differs from here")
CONTENT = Effect("harmless", "the content is the same")
"""Of keys that name what is compared by content, and refused if that differs."""
OWN = follows("a key of your own")
ANOTHER_ORDER = "the order of the data changes from here: some is read again, and some is left out"

EFFECTS = {
    "harmless": HARMLESS,
    "rounding": ROUNDING,
    "content": CONTENT,
    "refused": Effect("refused"),
    "at_start": Effect("harmless", "only a new run reads it"),
    "evaluations": follows("evaluations, and what depends on them, are not comparable with earlier ones"),
    "order": follows(ANOTHER_ORDER),
    "mixture": follows("the sources are mixed differently from here"),
    "updates": follows("the next updates differ"),
    "loss": follows("a different loss is minimized from here"),
    "length": follows("the run ends at a different step, and the learning rate follows the new length"),
    "controllers": follows(
        "a new controller starts here, and the learning rate loses the factor of one that is removed"
    ),
    "stopping": follows("the run may end or go back where it would not have before"),
}
"""Effects by the names that `field` knows."""
_ON_RESUME = "on_resume"


@overload
def field(default: T, *, on_resume: str | Effect | None = None) -> T: ...
@overload
def field(*, default_factory: Callable[[], T], on_resume: str | Effect | None = None) -> T: ...
def field(default: Any = MISSING, *, default_factory: Any = MISSING, on_resume: str | Effect | None = None) -> Any:
    """A field of a section, as `dataclasses.field`, that says what a change of it means for a resumed run.

    Args:
        on_resume: a name in `EFFECTS`, or an effect; None for that of the section around it.
    """
    effect = EFFECTS[on_resume] if isinstance(on_resume, str) else on_resume
    metadata = {} if effect is None else {_ON_RESUME: effect}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=metadata)  # pyright: ignore[reportCallIssue]


def effect_of(kind: type, path: str) -> Effect:
    """Returns what a changed key means for a resumed run: what its field states, or else the innermost section around it.

    Args:
        kind: the class of the configuration.
        path: dotted, such as `phases.0.optimizer.beta1`. A key that no class of jaxlm has is `OWN` unless its section states
            more.
    """
    effect, hints = OWN, [kind]
    for name in path.split("."):
        members = [member for hint in hints for member in _members(hint)]
        found = [one for member in members for one in _at(member, name)]
        hints = [hint for hint, _ in found]
        if hints or name != CHOICE_TYPE_KEY:
            effect = next(filter(None, (getattr(member, "keys_effect", None) for member in members)), effect)
        effect = next(filter(None, (stated for _, stated in found)), effect)
    return effect


def stated_effects(kind: type) -> dict[str, Effect]:
    """Field -> effect of the fields of a dataclass that state one."""
    stated = {field.name: field.metadata.get(_ON_RESUME) for field in dataclasses.fields(kind)}
    return {name: effect for name, effect in stated.items() if effect is not None}


def _members(hint: Any) -> Sequence[Any]:
    """The members of a union, or the one type."""
    if typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _at(member: Any, name: str) -> Iterator[tuple[Any, Effect | None]]:
    """The types, and the effects, of what a list, a mapping or a section of a type has under a name."""
    if typing.get_origin(member) in (list, dict):
        yield typing.get_args(member)[-1], None
    elif dataclasses.is_dataclass(member):
        kinds: list[Any] = [member]
        if is_choice(member) and name not in typing.get_type_hints(member):
            kinds += kinds[0].get_known_choices().values()
        for kind in kinds:
            if name in (hints := typing.get_type_hints(kind)):
                yield hints[name], stated_effects(kind).get(name)
