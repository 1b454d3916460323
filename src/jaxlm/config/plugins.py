"""What other packages bring: `package.module:name`, or names that an entry point `jaxlm.plugins` registers."""

import dataclasses
import functools
import importlib
import importlib.metadata
from typing import Any

from jaxlm.core.errors import ConfigError

ENTRY_POINTS = "jaxlm.plugins"


@functools.cache
def load_installed_plugins() -> tuple[str, ...]:
    """Imports what installed packages name in their entry points, once a process; their classes register themselves.

    Returns:
        The entry points, as `name (distribution)`.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    loaded = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = point.dist.name if point.dist is not None else point.value
        try:
            point.load()
        except Exception as error:  # whatever somebody else's module does when it is imported
            raise ConfigError(
                f"the plugin '{point.name}' of the installed package {package} cannot be loaded: "
                f"{type(error).__name__}: {error}. Mend or uninstall {package}"
            ) from error
        loaded.append(f"{point.name} ({package})")
    return tuple(loaded)


def is_import_path(name: Any) -> bool:
    """Whether a `type` names a class by its place instead of a registered name."""
    return isinstance(name, str) and ":" in name


def import_name(path: str) -> Any:
    """What stands at `package.module:name`; None where the module has nothing of that name.

    Raises:
        ConfigError: the path is of another form, or its module cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(f"'{path}' given, `package.module:name` expected")
    try:
        return getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # whatever somebody else's module does when it is imported
        raise ConfigError(
            f"'{path}': importing {module_name} failed: {type(error).__name__}: {error}. It must be installed, or lie in "
            f"the folder that the command is started in"
        ) from error


def import_choice(registry: Any, name: str) -> type:
    """The class at `package.module:Class`, which is registered under that name too.

    Args:
        registry: what it must be a subclass of.

    Raises:
        ConfigError: there is no such class, or it is not a dataclass of this registry.
    """
    found = import_name(name)
    if not (isinstance(found, type) and issubclass(found, registry) and dataclasses.is_dataclass(found)):
        what = "nothing" if found is None else f"no dataclass that extends {registry.__module__}.{registry.__name__}"
        raise ConfigError(f"'{name}': there is {what} of that name in {name.partition(':')[0]}")
    registry.register_subclass(name)(found)
    return found
