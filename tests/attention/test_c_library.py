"""The kernels load whatever the cache's folder is, and from a sound file only."""

import ctypes
import errno
import os
import pwd
import shutil
import tempfile
from pathlib import Path

import pytest

from vllm_h2o.attention.ops.cpu import library as c_library
from vllm_h2o.core.folders import cache_root

FAST = "-O0"  # to build, that is
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache with the kernels."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_H2O_CACHE", str(folder))
        c_library.load(FAST)
    (file,) = (folder / "kernels").iterdir()
    return file


@pytest.fixture
def warned(monkeypatch):
    said = []
    monkeypatch.setattr(
        c_library.logger, "warning_once", lambda text, *args: said.append(text % args)
    )
    return said


@pytest.fixture
def cache(built, tmp_path, monkeypatch):
    """A copy of it, to do harm to; nothing is built anew unless a test lets it."""
    shutil.copytree(built.parent, tmp_path / "kernels")
    monkeypatch.setenv("VLLM_H2O_CACHE", str(tmp_path))
    monkeypatch.setattr(c_library, "compile_source", must_not_build)
    return tmp_path / "kernels"


def must_not_build(*_):
    raise AssertionError("built what the cache has")


def copies(built):
    """Stands for the compiler: it takes seconds."""
    return lambda source, target, *flags: shutil.copy(built, target)


def is_loaded():
    return hasattr(c_library.load(FAST), "h2o_select")


def test_what_the_cache_has_is_not_built(cache, warned):
    assert is_loaded() and not warned


def test_what_the_cache_has_needs_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert is_loaded()
    with pytest.raises(RuntimeError, match="install gcc or clang"):
        c_library.compiler()


def test_what_is_damaged_is_built_anew(cache, built, monkeypatch, warned):
    """The dynamic linker would end the process, without a word."""
    (file,) = cache.iterdir()
    os.truncate(file, 4096)
    monkeypatch.setattr(c_library, "compile_source", copies(built))
    assert is_loaded()
    assert warned == [f"H2O removes {file}, which is damaged"]
    assert file.read_bytes() == built.read_bytes()


def test_a_compiler_that_is_replaced_is_another(cache, tmp_path, monkeypatch):
    """And CC may have options, and must be there."""
    real = shutil.which("gcc") or shutil.which("cc")
    mine = tmp_path / "mycc"
    mine.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    mine.chmod(0o755)
    monkeypatch.setenv("CC", f"{mine} -g0")
    assert c_library.compiler() == [str(mine), "-g0"]
    before = c_library._compiler_digest()
    mine.write_text(f'#!/bin/sh\n# newer\nexec {real} "$@"\n')
    assert c_library._compiler_digest() != before
    monkeypatch.setenv("CC", "/none/gcc")
    with pytest.raises(RuntimeError, match="CC is '/none/gcc'.*or unset it"):
        c_library.compiler()


def test_what_is_no_program_is_no_compiler(tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(RuntimeError, match=f"C compiler {broken} .*: set CC to gcc"):
        c_library.compile_source(tmp_path / "a.c", tmp_path / "a.so")


def no_home(monkeypatch):
    """Of a user without an entry in the passwd file."""

    def getpwuid(uid):
        raise KeyError(uid)

    monkeypatch.delenv("VLLM_H2O_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)


def file(monkeypatch):
    monkeypatch.setenv("VLLM_H2O_CACHE", __file__)


def read_only(monkeypatch):
    """Also for root."""
    monkeypatch.setenv("VLLM_H2O_CACHE", "/proc/h2o")


def long_path(monkeypatch):
    monkeypatch.setenv("VLLM_H2O_CACHE", f"/tmp/{'x' * 5000}")


def full(monkeypatch):
    def write_bytes(*_):
        raise FULL

    monkeypatch.setenv("VLLM_H2O_CACHE", f"{os.environ['VLLM_H2O_CACHE']}/other")
    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def noexec(monkeypatch):
    load, root = ctypes.CDLL, os.environ["VLLM_H2O_CACHE"]

    def refuse(path, *args):
        if path.startswith(root):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path, *args)

    monkeypatch.setattr(ctypes, "CDLL", refuse)


@pytest.mark.parametrize("harm", [no_home, file, read_only, long_path, full, noexec])
def test_a_folder_that_can_not_be_used_is_done_without(
    cache, built, monkeypatch, warned, harm
):
    monkeypatch.setattr(c_library, "compile_source", copies(built))
    harm(monkeypatch)
    assert is_loaded()
    assert warned
    for said in warned:
        assert "VLLM_H2O_CACHE" in said and "set VLLM_H2O_CACHE to a folder" in said
        assert len(said) < 500


def test_where_nothing_can_be_loaded_the_variable_is_named(cache, built, monkeypatch):
    def refuse(path, *args):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(c_library, "compile_source", copies(built))
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(RuntimeError, match="VLLM_H2O_CACHE.*TMPDIR.*failed to map"):
        c_library.load(FAST)


def test_without_a_temporary_folder_it_is_built_in_the_cache(
    cache, built, monkeypatch, warned
):
    shutil.rmtree(cache)
    monkeypatch.setenv("TMPDIR", "/none")
    monkeypatch.setattr(tempfile, "_get_default_tempdir", no_temporary_folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(c_library, "compile_source", copies(built))
    assert is_loaded() and not warned
    assert [file.suffix for file in cache.iterdir()] == [".so"]


def no_temporary_folder():
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_a_tilde_is_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("~/mine", str(tmp_path / "mine")):
        monkeypatch.setenv("VLLM_H2O_CACHE", named)
        assert cache_root() == tmp_path / "mine"
