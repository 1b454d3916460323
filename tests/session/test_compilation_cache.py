"""Compiled programs on disk, and how damaged ones are handled."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxlm.session.compilation.options import enable_compilation_cache

MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def options_of_jax():
    """Restores the options of the cache."""
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", MIN_SECONDS)}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_damaged_cached_program_is_replaced(tmp_path, capfd, monkeypatch):
    def compile_again() -> bytes:
        compilation_cache.reset_cache()
        jax.clear_caches()
        jax.jit(lambda x: jnp.sin(x) + 1).lower(1.0).compile()
        (kept,) = tmp_path.glob("*-cache")
        return kept.read_bytes()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        enable_compilation_cache(str(tmp_path))
        jax.config.update(MIN_SECONDS, 0.0)
        whole = compile_again()
        for damaged in (b"", b"no program", whole[: len(whole) // 2]):
            (kept,) = tmp_path.glob("*-cache")
            kept.write_bytes(damaged)
            assert len(compile_again()) > len(damaged)
            assert "cannot read jit_" in (stderr := capfd.readouterr().err)
            assert "The cached program was deleted and is compiled again" in stderr
            assert compile_again()
            assert not capfd.readouterr().err
        (kept,) = tmp_path.glob("*-cache")
        kept.write_bytes(b"in a read-only folder")
        with monkeypatch.context() as patched:
            patched.setattr(type(kept), "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
            compile_again()
        assert "The program is compiled without the cache" in capfd.readouterr().err


@pytest.mark.slow
def test_each_run_of_a_process_has_its_own_folder(tmp_path):
    """JAX itself keeps the first folder of a process."""

    def compiled_into() -> list[str]:
        jax.clear_caches()
        jax.jit(lambda x: jnp.sin(x) + 1).lower(1.0).compile()
        return sorted(folder.name for folder in tmp_path.iterdir() if any(folder.glob("*-cache")))

    found = []
    for folder in (tmp_path / "first", tmp_path / "second", None):
        enable_compilation_cache(folder and str(folder))
        jax.config.update(MIN_SECONDS, 0.0)
        found.append(compiled_into())
    assert found == [["first"], ["first", "second"], ["first", "second"]]
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_cannot_be_written_only_warns(tmp_path, capfd):
    folder = tmp_path / "cache"
    folder.write_text("a file in the place of the folder")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        enable_compilation_cache(str(folder))
        jax.config.update(MIN_SECONDS, 0.0)
        compilation_cache.reset_cache()
        assert jax.jit(lambda x: jnp.cos(x) * 2)(0.0) == 2.0
        assert "trainer.compilation_cache_dir: cannot" in capfd.readouterr().err
