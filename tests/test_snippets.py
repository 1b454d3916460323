"""Commands and Python in README.md and docs/ work: commands pass the real parsers, Python is run.

YAML is decoded by tests/test_guide.py. A command that cannot be checked has a reason above it: `<!-- not run: why -->`.
"""

import ast
import difflib
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import jaxlm.__main__ as command_line
from jaxlm.controllers.base import Controller, ControllerConfig
from jaxlm.evals.base import Eval, EvalConfig
from jaxlm.hardware.topologies import parse_topology
from jaxlm.models.base import Inputs, LanguageModel, ModelConfig
from jaxlm.objectives.next_token import NextToken
from jaxlm.observe.callbacks import Callback, CallbackConfig
from jaxlm.observe.trackers import Tracker, TrackerConfig, read_jsonl
from jaxlm.plan.load_config import decode_run
from jaxlm.reading.choices import Registry, sources
from jaxlm.reading.overrides import override, parse_arguments
from jaxlm.reading.yaml import ConfigSource
from jaxlm.session.command_parts import parts_of
from jaxlm.session.load_model import check_effective
from tests.end_to_end.fork_server import fork_server
from tests.objectives.test_next_token import a_batch, a_model
from tests.test_guide import DOCUMENTS, ROOT, a_model_of_hugging_face, an_adapter_of_peft
from tests.xla_flags import flags_for

BLOCK = re.compile(r"(?:<!-- not run: *(?P<reason>.*?) *-->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
NEWCOMER = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
# Definitions that a page's Python takes for granted: imports of base classes, and a command line.
PRELUDES = {
    "extend.md": """
        import sys
        from dataclasses import dataclass
        from jaxlm.optim.base import OptimizerConfig
        sys.argv = ["program", "--config_path", "mine.yaml"]
    """,
    "stackwise.md": """
        from pathlib import Path
        Path("config.yaml").write_text('''
        model: {d_model: 32, d_ff: 64, n_heads: 2, vocab_size: 300, architecture: {blocks_per_stack: 1}}
        data: {dataset_path: corpus.txt}
        training: {batch_size: 8, seq_len: 32, max_steps: 1, progressive: {training_objective: clm}}
        ''')
    """,
}
OTHER_PROGRAMS = {"echo", "gcloud", "export", "cd", "sleep", "venv", "mkdir", "source", "git"}
OTHER_PROGRAMS |= {"docker", "kubectl", "ray", "sbatch", "sky"}  # files of infra/ that they are given: tests/infra
TINY = """
data: {train_urls: ["corpus.txt"], validation_urls: ["corpus.txt"], cache_dir: cache/mine, vocab_size: 300}
model: {type: llama, seq_len: 32, hidden_dim: 32, intermediate_dim: 64, num_layers: 2, num_heads: 2, num_kv_heads: 2}
trainer: {num_train_steps: 2, train_batch_size: 8}
optimizer: {learning_rate: 1.0e-2, warmup: 0}  # two steps suffice to be better than a guess, which references must be
"""


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason` says why it is not checked, if it is not."""

    page: Path
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.strip().splitlines()[0]}"


def blocks(page: Path) -> list[Block]:
    return [Block(page, m["language"], m["text"], m["reason"]) for m in BLOCK.finditer(page.read_text("utf-8"))]


ALL = [block for page in DOCUMENTS for block in blocks(page)]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, one list per part of a pipe or a sequence."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word.strip("|;&"):
                words.append(word)
            else:
                yield from [without_prefix(words)] if without_prefix(words) else []
                words = []


def without_prefix(words: list[str]) -> list[str]:
    """A command without leading variables, `until` and `do`; empty for the rest of a loop's syntax."""
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in ("until", "do", "srun")):
        words = words[1:]
    return [] if words and words[0] in ("[", "done", "break") else words


def is_shell(block: Block) -> bool:
    begins = r"\s*(\w+=\S+ )*(python3? |\.venv/bin/|jaxlm |make |pip |--trainer)"
    return block.language == "sh" or (not block.language and re.match(begins, block.text) is not None)


class Parsed(BaseException):
    """Ends a command after it has parsed its command line. Not an `Exception`, so that nothing catches it."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's current folder: the models and adapters that the documents mention, and folders of the repository."""
    monkeypatch.chdir(tmp_path)
    for name in ("qwen-small", "llama-small", "model-folder"):
        a_model_of_hugging_face(tmp_path / name)
    an_adapter_of_peft(tmp_path / "adapter-folder")
    for name in ("config", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def write_configs(folder: Path, page: Path) -> None:
    """Writes the YAML files that a page names (`# mine.yaml`), which override README's."""
    for block in (*blocks(ROOT / "README.md"), *blocks(page)):
        name = re.match(r"# (\w+\.yaml)\n", block.text)
        if block.language == "yaml" and name:
            (folder / name[1]).write_text(block.text)
    if not (folder / "run.yaml").exists():
        (folder / "run.yaml").write_text((folder / "mine.yaml").read_text())


def check_jaxlm(name: str, arguments: list[str], monkeypatch) -> None:
    """Raises or fails if a jaxlm command does not accept its arguments."""
    if name not in command_line.commands():
        assert command_line.main([name, *arguments]) == 0
        return
    module = importlib.import_module(command_line.commands()[name][0])
    modules = [module, *(sys.modules[type(part).__module__] for part in parts_of(name))]

    def parsed_after(real):
        def planned(*given):
            real(*given)
            raise Parsed

        return planned

    def stop_after(real):
        def opened(first, *rest, **named):
            if real is not None:
                real(first, *rest, **named)
            dotted = [word for word in arguments if re.match(r"--(?!vars\.)\w+\.", word)]
            keys = parse_arguments([word for at in dotted for word in (at, arguments[arguments.index(at) + 1])]).options
            decode_run(override(ConfigSource({}), keys), "document")
            check_effective(next((keys for keys in rest if isinstance(keys, Mapping)), {}), also=named.get("also", ()))
            raise Parsed

        return opened

    with monkeypatch.context() as patched:
        for one in modules:
            for function in ("open_model", "evaluate_tasks", "read_runs", "fetch_bundle", "build_bundle"):
                if hasattr(one, function):
                    patched.setattr(one, function, stop_after(None))
            if hasattr(one, "load_config"):
                patched.setattr(one, "load_config", stop_after(one.load_config))
        if hasattr(module, "plan_study"):
            patched.setattr(module, "plan_study", parsed_after(module.plan_study))
        try:
            code: Any = module.main(arguments)
        except Parsed:
            code = 0
        except SystemExit as end:  # --help, or a parser's error
            code = end.code
    assert code == 0, f"`jaxlm {shlex.join([name, *arguments])}` ends with {code}"
    if "--topology" in arguments:
        for topology in arguments[arguments.index("--topology") + 1].split(","):
            parse_topology(topology)


def check_command(words: list[str], monkeypatch) -> None:
    """Fails for a command that does not exist or does not accept its arguments."""
    program, *rest = words
    if Path(program).name.startswith("python") and rest[:1] == ["-m"]:
        program, rest = rest[1], rest[2:]
    program = program.removeprefix(".venv/bin/")
    if program == "jaxlm":
        check_jaxlm(rest[0], rest[1:], monkeypatch) if rest else None
    elif program.startswith("jaxlm."):
        check_jaxlm(program.removeprefix("jaxlm."), rest, monkeypatch)
    elif program.startswith("--"):  # only options, to be appended to `jaxlm train`
        check_jaxlm("train", ["--config_path", "mine.yaml", *words], monkeypatch)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), words
    elif program == "pip":
        extras = re.findall(r"(?:jaxlm|\.)\[([\w,-]+)\]", " ".join(rest))
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {extra for several in extras for extra in several.split(",")} <= known.keys(), words
    elif program == "pytest":
        assert all((ROOT / word.partition("::")[0]).exists() for word in rest if word.startswith("tests")), words
    elif program == "bash" or program.startswith("infra/"):
        assert (ROOT / (rest[0] if program == "bash" else program)).exists(), words
    elif Path(program).name.startswith("python"):
        assert rest[0] in ("-c", "-m", "-") or (ROOT / rest[0]).exists() or rest[0] == "examples", words
    else:
        assert program in OTHER_PROGRAMS, f"{words}: not known here. Say why above the block: <!-- not run: why -->"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_commands_in_the_documents_are_accepted(page, folder, monkeypatch, capsys):
    write_configs(folder, page)
    for block in blocks(page):
        if is_shell(block) and block.reason is None:
            for words in commands(block):
                check_command(words, monkeypatch)


def test_a_wrong_flag_in_a_document_is_found(folder, monkeypatch, capsys):
    write_configs(folder, ROOT / "README.md")
    for words in (
        "jaxlm train --config_path mine.yaml --trainer.num_steps 4",
        "python -m jaxlm bench --config_path absent.yaml",
        "jaxlm sample --checkpoint checkpoints/mine --promt Once",
        "jaxlm evaluate --checkpoint checkpoints/mine --data.validation_url other/",
        "jaxlm convert to-hf --checkpoint checkpoints/mine --output mine-hf --verify yes",
        "jaxlm recipes nothing",
        "jaxlm trian --config_path mine.yaml",
        "make everything",
        "pip install 'jaxlm[all]'",
        "serve mine-hf",
    ):
        with pytest.raises((AssertionError, ValueError)):
            check_command(shlex.split(words), monkeypatch)


def test_blocks_say_what_they_are():
    """A newcomer's pages leave no block without a language, and what is not run says why."""
    languages = {"sh", "yaml", "python", "text", "json", "toml"}
    assert [str(b) for b in ALL if b.page in NEWCOMER and b.language not in languages] == []
    assert [str(b) for b in ALL if b.language not in {*languages, ""}] == []
    assert [str(b) for b in ALL if b.reason is not None and len(b.reason) < 10] == []
    unmatched = {page.name: page.read_text().count("<!-- not run") for page in DOCUMENTS}
    reasons = {page.name: sum(b.reason is not None for b in blocks(page)) for page in DOCUMENTS}
    assert unmatched == reasons, "a reason does not stand directly above its block"


def run_python(source: str, folder: Path) -> None:
    """Runs a program in a process of its own, which may register classes, on one device."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": flags_for(1)}
    command = [sys.executable, "-c", source]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a complete tiny run `mine`: mine.yaml, its text, its checkpoint and its logs; and its export."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus.txt").write_text(Path(os.__file__).read_text(encoding="utf-8")[:20000])
    (folder / "mine.yaml").write_text(TINY)
    for command, arguments in {
        "jaxlm.train": ["--config_path", "mine.yaml"],
        "jaxlm.commands.convert": ["to-hf", "--checkpoint", "checkpoints/mine", "--output_dir", "mine-hf"],
    }.items():
        environment = {**os.environ, "XLA_FLAGS": flags_for(1)}
        process = fork_server().start(command, arguments, folder, environment)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    return folder


PYTHON = {page: [block for block in blocks(page) if block.language == "python"] for page in DOCUMENTS}


PYTHON_PAGES = [page for page in DOCUMENTS if PYTHON[page]]
IMPORT_TRANSFORMERS = [page for page in PYTHON_PAGES if any("from transformers" in b.text for b in PYTHON[page])]
FAMILY_PAGE = ROOT / "docs" / "howto" / "add-a-family.md"  # its Python is that of a file, which registers its class


def python_of(page: Path) -> list[str]:
    """A page's blocks. Skips the test if they need transformers, and it is not installed."""
    texts = [block.text for block in PYTHON[page]]
    if any("from transformers" in text for text in texts):
        pytest.importorskip("transformers")
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PYTHON_PAGES if page != FAMILY_PAGE], ids=lambda page: page.name)
def test_python_in_the_documents_runs(page, trained):
    """Runs a page's blocks one after another, as one program."""
    run_python("\n".join([textwrap.dedent(PRELUDES.get(page.name, "")), *python_of(page)]), trained)


def test_the_page_about_families_shows_one_as_it_is():
    family = (ROOT / "src/jaxlm/interop/hf/families/arcee.py").read_text(encoding="utf-8")
    assert all(text in family for text in python_of(FAMILY_PAGE))


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page in IMPORT_TRANSFORMERS else ()) for page in PYTHON_PAGES],
    ids=lambda page: page.name,
)
def test_python_in_the_documents_compiles_and_its_imports_exist(page):
    assert [str(block) for block in PYTHON[page] if block.reason is not None] == [], "Python of the documents is run"
    for text in python_of(page):
        program = ast.parse(text)
        compile(program, str(page), "exec")
        imports = [node for node in program.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(imports, []), str(page), "exec"), {})


def own_classes() -> dict[str, tuple[str, dict[str, Any]]]:
    """The classes of docs/howto/extend.md: path of the file -> its Python, and the configuration below it."""
    found = {}
    for block, below in itertools.pairwise(blocks(ROOT / "docs" / "howto" / "extend.md")):
        if path := re.match(r"# (my_package/\w+\.py)\n", block.text):
            found[path[1]] = (block.text, yaml.safe_load(below.text))
    return found


KINDS = (
    "front",
    "focal",
    "my_objective",
    "momentum",
    "csv_file",
    "alarm",
    "calm",
    "confidence",
    "gains",
    "sums",
    "my_data",
    "bigram",
)


def test_the_table_of_base_classes_has_every_one_and_what_it_requires():
    text = (ROOT / "docs" / "howto" / "extend.md").read_text()
    rows = re.findall(r"^\|.*\| `(jaxlm\.[\w.]+)\.(\w+)` \| (.*) \|$", text, re.M)
    listed = {getattr(importlib.import_module(module), name): required for module, name, required in rows}
    for kind, required in listed.items():
        own = re.sub(r"\(.*?\)", "", required)  # in parentheses: what `open` or `build` returns
        assert set(re.findall(r"`(\w+)`", own)) == kind.__abstractmethods__, kind
    returned = {ModelConfig: LanguageModel, EvalConfig: Eval, TrackerConfig: Tracker, CallbackConfig: Callback}
    returned |= {ControllerConfig: Controller}
    for kind, product in returned.items():
        inside = re.findall(r"`(\w+)`", re.findall(r"\((.*?)\)", listed[kind])[0])
        assert (inside[0], set(inside[1:])) == (product.__name__, set(getattr(product, "__abstractmethods__", ())))
    for name, text in sources().items():
        if re.search(r"^class \w+\(.*\bRegistry\b", text, re.M):
            importlib.import_module(name)
    known = {kind for kind in Registry.__subclasses__() if kind.__module__.startswith("jaxlm.") and not kind.by_name}
    assert known == set(listed)


@pytest.mark.slow
def test_the_objective_from_scratch_is_its_formula():
    program, _ = own_classes()["my_package/focal.py"]
    names: dict[str, Any] = {"__name__": "focal"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "focal", ModuleType("focal"))
        exec(compile(program, "focal.py", "exec"), names)
    objective = names["Focal"](gamma=1.5)
    model, batch = a_model(), a_batch()

    def by_hand(model: Any) -> jax.Array:
        hidden = model.hidden(Inputs(batch.tokens, batch.positions, batch.segment_ids))
        log_p = jax.nn.log_softmax(model.logits(hidden.final).array)
        nats = -jnp.take_along_axis(log_p, batch.targets.array[..., None], axis=-1)[..., 0]
        return jnp.sum((1 - jnp.exp(-nats)) ** 1.5 * nats * batch.loss_mask.array)

    def total(model: Any) -> jax.Array:
        return objective.terms(model, batch, None, key=None)[0]["loss"].total

    found, gradient = jax.jit(jax.value_and_grad(total))(model)
    expected, wanted = jax.jit(jax.value_and_grad(by_hand))(model)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    cross_entropy, (terms, metrics, _) = (
        jax.jit(lambda model, o=o: o.terms(model, batch, None, key=None))(model)
        for o in (names["Focal"](gamma=0.0), NextToken())
    )
    np.testing.assert_allclose(cross_entropy[0]["loss"].mean(), terms["loss"].mean(), rtol=1e-6)
    np.testing.assert_allclose(cross_entropy[1]["loss"].mean(), metrics["loss"].mean(), rtol=1e-6)
    assert {k: float(v) for k, v in objective.weights(batch).items()} == {
        k: float(v) for k, v in NextToken().weights(batch).items()
    }


@pytest.mark.slow
def test_own_classes_of_the_documents_train(trained):
    """Each file of the page, from outside the package, with the configuration that the page gives below it."""
    found = {Path(path).stem: pair for path, pair in own_classes().items()}
    assert sorted(found) == sorted(KINDS)
    (trained / "my_package").mkdir()
    (trained / "texts").mkdir()
    (trained / "texts" / "a.txt").write_text((trained / "corpus.txt").read_text())
    (trained / "model-folder").symlink_to("mine-hf")
    np.save(trained / "gains.npy", np.full((2, 32), 0.5, np.float32))
    for name, (program, keys) in found.items():
        (trained / "my_package" / f"{name}.py").write_text(program)
        whole = yaml.safe_load(TINY) | {k: v for k, v in keys.items() if k not in ("data", "trainer")}
        for section in ("data", "trainer"):
            whole[section] |= keys.get(section, {})
        whole["trainer"] |= {"compilation_cache_dir": "xla"}  # several have the same program
        whole["data"] |= {"cache_dir": f"cache/{name}"}
        if "source" in whole["data"]:
            del whole["data"]["train_urls"], whole["data"]["validation_urls"]
        (trained / f"own_{name}.yaml").write_text(yaml.safe_dump(whole))
    run_python(
        "import sys; sys.path.insert(0, '.'); from jaxlm.train import main\n"
        f"for name in {KINDS}: assert main(['--config_path', f'own_{{name}}.yaml']) == 0, name",
        trained,
    )
    logged = {name: read_jsonl(trained / "logs" / f"own_{name}" / "metrics.jsonl") for name in KINDS}
    assert all(any(record.get("train/loss") for record in records) for records in logged.values())
    assert any("eval/confident" in record for record in logged["confidence"])
    assert "2,train/loss," in (trained / "all.csv").read_text()


def test_json_in_the_documents_is_valid():
    for block in ALL:
        if block.language == "json":
            assert [json.loads(line) for line in block.text.splitlines()]


def test_links_of_the_readme_resolve():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def messages() -> list[str]:
    """Every string in the source, with `...` for each interpolated value. Adjacent literals count as one string."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.slow
def test_explained_errors_exist_in_the_source():
    """Each error quoted on the troubleshooting page is a message in the source; `...` stands for anything."""
    known = messages()
    text = "\0".join(known)
    gone = {}
    for block in blocks(ROOT / "docs" / "start" / "troubleshoot.md"):
        quoted = block.text.strip()
        parts = filter(None, map(str.strip, quoted.split("...")))
        if not re.search(r"[^\0]*".join(map(re.escape, parts)), text):
            gone[quoted] = difflib.get_close_matches(quoted, known, n=1, cutoff=0.2)
    assert gone == {}, "quoted text: what the source says now"
