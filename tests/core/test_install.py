"""What to run for the packages of an extra, for each way in which jaxlm may be installed."""

import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from jaxlm.core.install import install_command

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def installed(monkeypatch):
    """As an installer writes the metadata of a wheel, or of an editable installation."""
    listed = [f"{package} ; extra == '{extra}'" for extra, packages in EXTRAS.items() for package in packages]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=2.0", *listed])


@pytest.mark.parametrize("extras", [("eval",), ("hf",), ("hf", "torch"), ("gpu",), ("math",)])
def test_the_command_names_the_packages_of_the_extras(installed, extras):
    pip, install, *packages = shlex.split(install_command(*extras))
    assert (pip, install) == ("pip", "install")
    assert sorted(packages) == sorted(package for extra in extras for package in EXTRAS[extra])


def test_a_source_tree_that_is_not_installed_is_installed_from_its_folder(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert shlex.split(install_command("hf", "torch")) == ["pip", "install", "-e", f"{ROOT}[hf,torch]"]


def test_no_command_installs_jaxlm_from_an_index():
    """An index may have another project of this name. `--no-index` looks only at the wheels that somebody copied."""
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = [path for path in texts if path.name != "log.md"]
    lines = [(path, line) for path in texts for line in path.read_text().splitlines()]
    wrong = re.compile(r"pip install (?!.*(--no-index| @ )).*\bjaxlm\[")
    assert [f"{path.relative_to(ROOT)}: {line}" for path, line in lines if wrong.search(line)] == []


def test_commands_are_asked_for_extras_that_exist():
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    calls = [call for text in sources for call in re.findall(r"install_command\((['\"].*?)\)", text)]
    named = {name for call in calls for name in re.findall(r"['\"]([\w-]+)['\"]", call)}
    assert len(named) >= 6
    assert named <= EXTRAS.keys()


def test_what_pip_may_choose_ends_with_the_jax_that_is_tested():
    """The next minor version of jax is not installed before the constraints have it: 0.11 broke haliax, which is fixed."""
    tested = re.findall(r"^jax==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        package for package in (*project["dependencies"], *EXTRAS["gpu"], *EXTRAS["tpu"]) if package.startswith("jax")
    ]
    assert len(asked) == 3
    for package in asked:
        versions = SpecifierSet(re.sub(r"^jax(\[\w+\])?", "", package))
        assert all(versions.contains(version) for version in tested)
        newest = max(tuple(map(int, version.split("."))) for version in tested)
        assert not versions.contains(f"{newest[0]}.{newest[1] + 1}.0")
