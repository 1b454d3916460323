"""The command that installs the packages of an extra (`jaxlm[hf]`), however jaxlm itself was installed."""

import importlib.metadata
import re
import shlex
from pathlib import Path

_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)['\"]")


def install_command(*extras: str) -> str:
    """Returns the command that installs the packages of some extras.

    It names the packages, not `jaxlm[extra]`: no package index has jaxlm, and one that has another project of this name would
    install that.
    """
    try:
        requirements = importlib.metadata.requires("jaxlm") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        tree = f"{Path(__file__).parents[3]}[{','.join(extras)}]"
        return f"pip install -e {shlex.quote(tree)}"
    packages = [package for package, extra in map(_parsed, requirements) if extra in extras]
    return f"pip install {' '.join(map(shlex.quote, packages))}"


def _parsed(requirement: str) -> tuple[str, str]:
    """The package of a requirement with its versions, and the extra that it belongs to; empty for none."""
    package, _, marker = requirement.partition(";")
    extra = _EXTRA.search(marker)
    return package.strip(), extra[1] if extra else ""
