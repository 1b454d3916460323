"""What a changed key means for a run that resumes. Its field says so, or that of a section around it:

log_dir: Harmless[str] = "logs/"
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_origin

Kind = Literal["harmless", "changes what follows", "refused"]


@dataclass(frozen=True)
class Effect:
    """What a change does to a resumed run.

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
ANOTHER_ORDER = "the data has another order from here: some is read again, and some is left out"

T = TypeVar("T")
Harmless = Annotated[T, HARMLESS]
Rounding = Annotated[T, ROUNDING]
Content = Annotated[T, CONTENT]
Refused = Annotated[T, Effect("refused")]
AtTheStart = Annotated[T, Effect("harmless", "only a new run reads it")]
Evaluations = Annotated[T, follows("evaluations, and what depends on them, are not comparable with earlier ones")]
Order = Annotated[T, follows(ANOTHER_ORDER)]
Mixture = Annotated[T, follows("the sources are mixed in another way from here")]
Updates = Annotated[T, follows("the next updates differ")]
Loss = Annotated[T, follows("another loss is minimized from here")]
Length = Annotated[T, follows("the run ends at another step, and the learning rate follows the new length")]
Stopping = Annotated[T, follows("the run may end or go back where it would not have before")]


def stated_effect(hint: Any) -> Effect | None:
    """The effect that a field's type states."""
    return next((item for item in _metadata(hint) if isinstance(item, Effect)), None)


def without_effect(hint: Any) -> Any:
    """A field's type without the effect that it states."""
    rest = tuple(item for item in _metadata(hint) if not isinstance(item, Effect))
    if rest == _metadata(hint):
        return hint
    return Annotated[(hint.__origin__, *rest)] if rest else hint.__origin__


def _metadata(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if get_origin(hint) is Annotated else ()
