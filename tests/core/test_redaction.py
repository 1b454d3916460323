"""What is a secret, and what is not."""

import pytest

from jaxlm.core import redaction
from jaxlm.core.errors import ConfigError
from jaxlm.core.redaction import MASK, redacted, redacted_arguments, remember_secrets, without_secrets
from jaxlm.core.stores import open_store
from jaxlm.plan.run_config import RunConfig
from jaxlm.reading.schema import sections


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
        # Not secrets.
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


@pytest.mark.parametrize("key", ["secret_key", "api_keys", "passwords", "x-api-key", "credentials"])
def test_keys_are_recognized_in_their_usual_spellings(key):
    assert without_secrets({key: ["abc"]}) == {key: [MASK]}


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
    assert [name for name in sorted(names) if without_secrets({name: "value-1"}) != {name: "value-1"}] == []
