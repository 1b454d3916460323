"""Classes from other packages: by import path (`package.module:name`), or registered by a `jaxlm.plugins` entry point."""

import dataclasses
import functools
import importlib
import importlib.metadata
from typing import Any

from jaxlm.core.errors import ConfigError

ENTRY_POINTS = "jaxlm.plugins"


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
    """Whether a `type` is an import path rather than a registered name."""
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
