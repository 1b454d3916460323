"""What a dry run says of the tasks of CORE."""

from tests.session.test_dry_run import folder, refused  # noqa: F401 - a fixture


def test_a_dry_run_says_that_the_tasks_are_missing(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    data = {"train_urls": ["text.txt"], "tokenizer": folder}
    wrong = refused(data=data, evals=[{"type": "core", "bundle": "bundle"}])
    assert wrong.keys() == {"evaluation core"}
    message = "evals: core: bundle: 'bundle' given, but it has no core.yaml. To download the bundle, run jaxlm"
    assert wrong["evaluation core"].startswith(message)
