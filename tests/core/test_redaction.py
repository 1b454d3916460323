"""What is a secret, and what is not."""

import html
import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from jaxlm.core import redaction
from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import (
    MASK,
    redact,
    redacted,
    redacted_arguments,
    redacted_bytes,
    remember_secrets,
    without_secrets,
)
from jaxlm.core.stores import open_store
from jaxlm.core.values.logged import Sample
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading import recipes
from jaxlm.reading.schema import sections
from jaxlm.reading.yaml import load_yaml

SOURCES = Path(redaction.__file__).parents[1]


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    monkeypatch.setattr(redaction, "_remembered", set())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://ada:s3cr:et@host/x", f"https://ada:{MASK}@host/x"),
        ("https://ada:s3@cr@et@host/x", f"https://ada:{MASK}@host/x"),
        ("https://ada:s3cret@host/x?to=b@c", f"https://ada:{MASK}@host/x?to=b@c"),
        ("'postgres://u:p@db:5432/x'", f"'postgres://u:{MASK}@db:5432/x'"),
        ("git+https://ghp@github.com/x", f"git+https://{MASK}@github.com/x"),
        ("https://h/x?a=1&X-Amz-Signature=ab12&b=2", f"https://h/x?a=1&X-Amz-Signature={MASK}&b=2"),
        ("https://h/x?sig=a%2Bb, and", f"https://h/x?sig={MASK}, and"),
        ("https://h/x?X-Goog-Credential=a%40b", f"https://h/x?X-Goog-Credential={MASK}"),
        (f"token hf_{'a' * 34} given", f"token {MASK} given"),
        ("AKIAIOSFODNN7EXAMPLE", MASK),
        ("https://h/cb?code=4%2Fabc&state=1", f"https://h/cb?code={MASK}&state=1"),
        ("https://h/cb#access_token=abc&x=1", f"https://h/cb#access_token={MASK}&x=1"),
        ("https://h/x?clientSecret=abc", f"https://h/x?clientSecret={MASK}"),
        ("https://u:12/SECRET@h", f"https://u:{MASK}@h"),
        ("HTTPS://TOKEN@h", f"HTTPS://{MASK}@h"),
        # Not secrets.
        ("https://host:443/a@b", "https://host:443/a@b"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
        ("gs://bucket/run@2", "gs://bucket/run@2"),
        ("ada@example.org: monkey=1 token=2", "ada@example.org: monkey=1 token=2"),
        ("https://h/x?tokens=5", "https://h/x?tokens=5"),
    ],
)
def test_secrets_are_masked_by_place_and_form(text, expected):
    assert redacted(text) == expected
    assert redacted(expected) == expected, "masking twice changes nothing"


def test_variables_of_the_environment_are_masked_unless_they_may_occur_by_chance(monkeypatch, tmp_path):
    (tmp_path / "key-2026.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {
        "WANDB_API_KEY": "0123456789abcdef",
        "AWS_SECRET_ACCESS_KEY": "a/b+c0123456789",
        "DB_PASSWORD": "short1",
        "MY_KEY": "checkpoints",
        "MY_API_KEY": "ABCDEF0123456789",
        "MY_SECRET": "abcdefghijklmnopqrstuvwxyz",
        "OTHER_SECRET": "/bcdef+0123456789",
        "SIGNING_KEY": f"{tmp_path}/key-2026.json",
        "SSH_KEY": "~/key-2026.json",
        "KEYBOARD": "keyboard-2026",
    }.items():
        monkeypatch.setenv(name, value)
    assert redacted("x0123456789abcdefx, a/b+c0123456789, a%2Fb%2Bc0123456789") == f"x{MASK}x, {MASK}, {MASK}"
    assert redacted("ABCDEF0123456789 abcdefghijklmnopqrstuvwxyz /bcdef+0123456789") == f"{MASK} {MASK} {MASK}"
    kept = f"short1 checkpoints {tmp_path}/key-2026.json ~/key-2026.json keyboard-2026"
    assert redacted(kept) == kept


def test_a_secret_of_the_configuration_is_masked_everywhere_after_that():
    tree = {"data": {"train_urls": ["https://u:pass%2Fw0rd@h/x"]}, "trackers": [{"api_key": "k-123456789", "top_k": 5}]}
    assert without_secrets(tree) == {
        "data": {"train_urls": [f"https://u:{MASK}@h/x"]},
        "trackers": [{"api_key": MASK, "top_k": 5}],
    }
    remember_secrets(tree)
    assert redacted("login of pass/w0rd with k-123456789") == f"login of {MASK} with {MASK}"


@pytest.mark.parametrize(
    "key",
    [
        *(
            "secret_key",
            "api_keys",
            "passwords",
            "x-api-key",
            "credentials",
            "sas_token",
            "account_key",
            "clientSecret",
        ),
        *("secretAccessKey", "connection_string", "AccountKey", "hubToken", "AWSAccessKeyId", "dbPassword"),
    ],
)
def test_keys_are_recognized_in_their_usual_spellings(key):
    assert without_secrets({key: ["abc"]}) == {key: [MASK]}


def test_tokens_of_a_vocabulary_are_no_secrets():
    tree = {
        **{
            "max_tokens": 5,
            "tokenizer": "hub/name-2024-v1.5-large",
            "num_tokens": "1000000000000000",
            "text_key": "t1",
        },
        **{
            "pad_token": "<|reserved_special_token_250|>",
            "eos_token": "</s>",
            "mask_token": "[MASK]",
            "bos_token": "word",
        },
        **{
            "mapping": {"token": ["replica", "data"]},
            "eos_token_id": [1, 2],
            "stop_token": "\u2581end",
            "special_tokens": ["<|im_start|>"],
        },
    }
    assert without_secrets(tree) == tree
    assert without_secrets({"mytoken": "glpat-0123456789abcdef", "token": "abc-defgh"}) == {
        "mytoken": MASK,
        "token": MASK,
    }


def test_a_line_of_json_stays_one(monkeypatch):
    monkeypatch.setenv("MY_SECRET", 'a"b\\')
    monkeypatch.setenv("MY_OTHER_SECRET", 'a"b\\cdefgh')
    for text in ('see "https://h/?token=abc"', "https://u:pw\n@x", 'a"b\\cdefgh"', 'https://tok"@h', "?sig=a\\b"):
        for ensure_ascii in (True, False):
            line = redacted(json.dumps({"text": text, "é": 1}, ensure_ascii=ensure_ascii))
            assert json.loads(line)["é"] == 1
    assert json.loads(redacted(json.dumps({"text": 'a"b\\cdefgh"'}))) == {"text": f'{MASK}"'}


@pytest.mark.slow
def test_no_recipe_and_no_file_of_levanter_is_changed():
    vectors = Path(__file__).parents[1] / "vectors"
    for path in (*recipes.all_recipes().values(), *vectors.glob("*.yaml")):
        tree = load_yaml(path).tree
        assert without_secrets(tree) == tree, path


@pytest.mark.parametrize(
    "name", ["PGPASSWORD", "MYTOKEN", "KAGGLE_KEY", "MYSQL_PWD", "CLIENT_SECRET2", "AZURE_STORAGE_CONNECTION_STRING"]
)
def test_variables_are_recognized_in_their_usual_spellings(monkeypatch, name):
    monkeypatch.setenv(name, 'k"9é<&0123456789abcdef' if name != "KAGGLE_KEY" else "0123456789abcdef0123")
    value = os.environ[name]
    for form in (value, json.dumps(value)[1:-1], html.escape(value), quote(value)):
        assert redacted(f"a {form} b") == f"a {MASK} b"
    assert without_secrets({"path": f"a/{value}"}) == {"path": f"a/{MASK}"}
    assert redact([Sample("eval", f"Say {value}", value), {value: 1.5}]) == [
        Sample("eval", f"Say {MASK}", MASK),
        {MASK: 1.5},
    ]
    assert redacted_bytes(b"\xff" + value.encode()) == b"\xff" + MASK.encode()


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "SSH_AUTH_SOCK"])
def test_variables_without_secrets_are_left_alone(monkeypatch, name):
    monkeypatch.setenv(name, "/no/such-folder-1")
    assert redacted("/no/such-folder-1/a") == "/no/such-folder-1/a"


def test_nothing_else_writes_texts_for_people():
    """They go through `redaction.write_text`, `redacted` and a `LogFile`, or a tracker."""
    data = ("data/", "engine/checkpoint/", "systems/nanochat/core_bundle.py", "session/compilation/")
    published = (
        "interop/hf/",
        "interop/peft/write.py",
        "systems/nanochat/torch_checkpoint.py",
    )  # model cards are redacted before
    unchanged = ("core/redaction.py", "systems/nanochat/scaling_members.py")  # docs/reliability.md
    found = [
        name
        for path in SOURCES.rglob("*.py")
        if ".write_text(" in path.read_text(encoding="utf-8")
        and not (name := path.relative_to(SOURCES).as_posix()).startswith((*data, *published, *unchanged))
    ]
    assert found == []
    logs = {path.stem for path in SOURCES.rglob("*.py") if "import LogFile" in path.read_text(encoding="utf-8")}
    assert logs == {"console", "jsonl"}, "each redacts texts: tests/observe/test_decisions.py"


def test_a_url_that_is_a_key_has_no_password():
    assert without_secrets({"https://u:pw@h/x": 0.5}) == {f"https://u:{MASK}@h/x": 0.5}


def test_environment_variables_that_may_be_names_do_not_mask_paths(monkeypatch):
    monkeypatch.setenv("PROJECT_KEY", "acme-research")
    assert without_secrets({"cache_dir": "/mnt/acme-research/cache"}) == {"cache_dir": "/mnt/acme-research/cache"}


def test_a_url_that_was_saved_without_its_password_is_refused():
    with pytest.raises(ConfigError, match=r"^data: 'https://u:<redacted>@h/x': jaxlm does not save passwords"):
        open_store(redacted("https://u:pw@h/x"), "data")


def test_a_command_line_is_masked_by_its_options():
    given = [
        "--config_path",
        "run.yaml",
        "--t.0.api_key",
        "abc",
        "--t.password=def",
        "--trainer.id",
        "abc",
        "https://u:p@h",
    ]
    expected = [*given[:3], MASK, f"--t.password={MASK}", "--trainer.id", "abc", f"https://u:{MASK}@h"]
    assert redacted_arguments(given) == expected
    variable = ["--s.api_key_variable", "MY_KEY", "--s.api_key_variable", "sk-by-mistake"]
    assert redacted_arguments(variable) == [*variable[:3], MASK]


def test_no_key_of_jaxlm_is_taken_for_a_secret():
    keys = {key.name for section in sections(RunConfig) for key in section.keys}
    names = {name for name in keys if not name.endswith("_variable")}
    assert len(names) > 300
    values = ("value-1", "<|value-0123456789-abcdef|>")
    assert [name for name in sorted(names) for value in values if without_secrets({name: value}) != {name: value}] == []
