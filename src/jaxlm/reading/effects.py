"""What a changed key means for a run that resumes: its field's type says so (`log_dir: Harmless[str]`), or that of a section
around it.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from draccus.choice_types import CHOICE_TYPE_KEY

from jaxlm.reading.decode import is_choice

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

T = TypeVar("T")
Harmless = Annotated[T, HARMLESS]
Rounding = Annotated[T, ROUNDING]
Content = Annotated[T, CONTENT]
Refused = Annotated[T, Effect("refused")]
AtTheStart = Annotated[T, Effect("harmless", "only a new run reads it")]
Evaluations = Annotated[T, follows("evaluations, and what depends on them, are not comparable with earlier ones")]
Order = Annotated[T, follows(ANOTHER_ORDER)]
Mixture = Annotated[T, follows("the sources are mixed differently from here")]
Updates = Annotated[T, follows("the next updates differ")]
Loss = Annotated[T, follows("a different loss is minimized from here")]
Length = Annotated[T, follows("the run ends at a different step, and the learning rate follows the new length")]
Controlling = Annotated[
    T, follows("a new controller starts here, and the learning rate loses the factor of one that is removed")
]
Stopping = Annotated[T, follows("the run may end or go back where it would not have before")]


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
        hints = [hint for member in members for hint in _at(member, name)]
        if hints or name != CHOICE_TYPE_KEY:
            effect = next(filter(None, (getattr(member, "keys_effect", None) for member in members)), effect)
        effect = next(filter(None, map(_stated, hints)), effect)
    return effect


def stated_effects(kind: type) -> dict[str, Effect]:
    """Field -> effect of the fields of a dataclass that state one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: effect for name, hint in hints.items() if (effect := _stated(hint)) is not None}


def _members(hint: Any) -> Sequence[Any]:
    """The members of a union, or the one type."""
    if typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _at(member: Any, name: str) -> Iterator[Any]:
    """The types of what a list, a mapping or a section of a type has under a name."""
    if typing.get_origin(member) in (list, dict):
        yield typing.get_args(member)[-1]
    elif dataclasses.is_dataclass(member):
        kinds: list[Any] = [member]
        if is_choice(member) and name not in typing.get_type_hints(member):
            kinds += kinds[0].get_known_choices().values()
        hints = (typing.get_type_hints(kind, include_extras=True) for kind in kinds)
        yield from (hint[name] for hint in hints if name in hint)


def _stated(hint: Any) -> Effect | None:
    metadata = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
    return next((item for item in metadata if isinstance(item, Effect)), None)
