"""Kinds of sections (`type:`): registered here, by an import path (`package.module:name`), or by a plugin."""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, dataclass_transform

import draccus

from jaxlm.core.errors import ConfigError

T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def choice(section: Any, name: str, *, role: str = "") -> Callable[[T], T]:
    """Makes a class a frozen dataclass, which `type: name` selects.

    Args:
        section: the registry that it extends.
        role: what it is used for where no type is given (`Registry.of_role`).
    """
    return lambda kind: section.register_subclass(name)(dataclass(frozen=True)(kind))


@functools.cache
def sources() -> Mapping[str, str]:
    """Module -> source code, of all modules of jaxlm. So they are searched without being imported."""
    package = Path(__file__).parents[1]
    files = {file.relative_to(package.parent): file for file in sorted(package.rglob("*.py"))}
    return {".".join(name.with_suffix("").parts): file.read_text(encoding="utf-8") for name, file in files.items()}


_REGISTRATION = re.compile(r'^(?:@choice\((\w+), |(\w+)\.register_subclass\()"([^"]+)"', re.M)
_ROLE = re.compile(r'^@choice\((\w+), "([^"]+)", role="([^"]+)"', re.M)


@functools.cache
def registrations() -> Mapping[str, Mapping[str, str]]:
    """Registry -> name of a type -> the module that registers it."""
    found: dict[str, dict[str, str]] = {}
    for module, text in sources().items():
        for decorated, called, name in _REGISTRATION.findall(text):
            found.setdefault(decorated or called, {})[name] = module
    return found


class Registry(draccus.choice_types.ChoiceRegistryBase):
    """A section whose `type:` selects a class. The module that registers it is imported when its name is first asked for.

    Draccus knows a registry by its direct base, so a registry also names `draccus.ChoiceRegistry`.

    Attributes:
        by_name: the name of a type alone selects it too, with its default keys. Given with the bases of the registry.
    """

    by_name: ClassVar[bool] = False
    _modules: ClassVar[Mapping[str, str]]

    def __init_subclass__(cls, *, by_name: bool = False, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if Registry in cls.__bases__:
            cls._choice_registry, cls.by_name = {}, by_name
            cls._modules = registrations().get(cls.__name__, {})

    @classmethod
    def register_subclass(cls, name: str, choice_type: Any = None) -> Any:
        if choice_type is None:
            return functools.partial(cls.register_subclass, name)
        module = choice_type.__module__
        if cls._modules.get(name, module) != module:
            raise ConfigError(
                f"type: {name}: {module} registers {choice_type.__qualname__} under this name, which is that of a class of"
                f" jaxlm, in {cls._modules[name]}. Give it another name"
            )
        return super().register_subclass(name, choice_type)

    @classmethod
    def get_choice_class(cls, name: str) -> Any:
        if name not in cls._choice_registry and name in cls._modules:
            importlib.import_module(cls._modules[name])
        return super().get_choice_class(name)

    @classmethod
    def of_role(cls, role: str) -> str | None:
        """The name of the type that says that it has this role, without imports; None if there is none."""
        found = [match for text in sources().values() for match in _ROLE.findall(text)]
        return next((name for registry, name, given in found if (registry, given) == (cls.__name__, role)), None)

    @classmethod
    def known_names(cls) -> list[str]:
        """The names of all types, without imports."""
        return sorted({*cls._choice_registry, *cls._modules})

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        for module in cls._modules.values():
            importlib.import_module(module)
        return super().get_known_choices()


def names_of(registry: Any, kind: type) -> list[str]:
    """The names under which a registry has a class."""
    return [name for name, member in registry._choice_registry.items() if member is kind]


def registered_class(registry: Any, name: str | None) -> type | None:
    """The class that a registry has under a name, if it has one."""
    try:
        return registry.get_choice_class(name)
    except KeyError:
        return None


ENTRY_POINTS = "jaxlm.plugins"
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@functools.cache
def load_installed_plugins() -> tuple[str, ...]:
    """Imports the plugins that installed packages list as entry points, once per process. Their classes register themselves.

    Returns:
        The entry points, as `name (distribution)`.
    """
    loaded = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = point.dist.name if point.dist is not None else point.value
        try:
            point.load()
        except Exception as error:  # importing a third-party module can raise anything
            raise ConfigError(
                f"the plugin '{point.name}' of the installed package {package} cannot be loaded: "
                f"{type(error).__name__}: {error}. Fix or uninstall {package}"
            ) from error
        loaded.append(f"{point.name} ({package})")
    return tuple(loaded)


def is_import_path(name: Any) -> bool:
    """Tells whether a `type` is an import path rather than a registered name."""
    return isinstance(name, str) and ":" in name


def import_name(path: str) -> Any:
    """Imports `package.module:name`. Returns None if the module has no such attribute."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(f"'{path}' given, `package.module:name` expected")
    try:
        return getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # importing a third-party module can raise anything
        raise ConfigError(
            f"'{path}': importing {module_name} failed: {type(error).__name__}: {error}. Install it, or run the command "
            "from the folder that contains it"
        ) from error


def import_choice(registry: Any, name: str) -> type:
    """Imports the dataclass at `package.module:Class`, which must extend `registry`, and registers it under that path."""
    imported = import_name(name)
    if not (isinstance(imported, type) and issubclass(imported, registry) and dataclasses.is_dataclass(imported)):
        what = "nothing" if imported is None else f"no dataclass that extends {registry.__module__}.{registry.__name__}"
        raise ConfigError(f"'{name}': there is {what} of that name in {name.partition(':')[0]}")
    registry.register_subclass(name)(imported)
    return imported


def own_modules(section: Any) -> set[str]:
    """The imported modules of the classes and functions from outside jaxlm and Python that a section or a section in it
    names.

    A reward's function is not among them: only the reward's own process imports it.
    """
    match section:
        case str() if _IMPORT_PATH.fullmatch(section):
            module = section.partition(":")[0]
            is_own = module in sys.modules and module.partition(".")[0] not in sys.stdlib_module_names
            return {module} if is_own else set()
        case Mapping():
            inner: Iterable[Any] = section.values()
        case list() | tuple():
            inner = section
        case _ if dataclasses.is_dataclass(section) and not isinstance(section, type):
            inner = [getattr(section, field.name) for field in dataclasses.fields(section)]
        case _:
            return set()
    modules = {type(section).__module__} if dataclasses.is_dataclass(section) and not _is_ours(type(section)) else set()
    return modules.union(*map(own_modules, inner))


def signature_problems(kind: type) -> Iterator[str]:
    """The methods of a class from outside jaxlm that cannot be called as its base class in jaxlm says."""
    bases = [base for base in kind.__mro__ if _is_ours(base)]
    if kind in bases:
        return
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        base = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if name.startswith("_") or method is base or not inspect.isfunction(method):
            continue
        if isinstance(base, property):
            yield f"the class {kind.__qualname__} defines {name} as a method, but it is a property. Add @property"
        elif inspect.isfunction(base) and not _accepts(method, base):
            yield (
                f"the class {kind.__qualname__} defines {_call_of(method)}, but it is called as {_call_of(base)}. Change its"
                " parameters"
            )


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == __name__.split(".")[0]


def _accepts(function: Callable, interface: Callable) -> bool:
    """Tells whether a function can be called with all parameters of another."""
    parameters = inspect.signature(interface).parameters.values()
    positional = [None for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def _call_of(function: Callable) -> str:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"{function.__name__}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
