"""The hook fires once, whenever it is set, and not for a failed import."""

import importlib
import os
import sys

import pytest

from vllm_h2o.plugin import early_hook
from vllm_h2o.plugin.import_hook import when_imported


@pytest.fixture
def seen():
    return []


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module; returns its name."""

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return write


def test_before_the_import(module, seen):
    name = module("hook_before", "x = 1")
    when_imported(name, lambda m: seen.append(m.x))
    when_imported(name, lambda m: seen.append("twice"))
    assert seen == []
    importlib.import_module(name)
    importlib.import_module(name)
    assert seen == [1]


def test_after_the_import(module, seen):
    name = module("hook_after", "x = 2")
    importlib.import_module(name)
    when_imported(name, lambda m: seen.append(m.x))
    assert seen == [2]


def test_during_the_import(module, seen, monkeypatch):
    source = "import hook_registry; hook_registry.hook(__name__); x = 3"
    name = module("hook_during", source)
    module("hook_registry", "hook = None")
    registry = importlib.import_module("hook_registry")
    registry.hook = lambda name: when_imported(name, lambda m: seen.append(m.x))
    importlib.import_module(name)
    assert seen == [3]


def test_failed_import(module, seen):
    name = module("hook_failed", "x = 4; raise OSError")
    when_imported(name, seen.append)
    with pytest.raises(OSError):
        importlib.import_module(name)
    assert seen == []


def test_vllm_knows_our_environment_variables(monkeypatch):
    """Those that are set; else `--fail-on-environ-validation` would refuse them."""
    from vllm import envs
    from vllm.platforms import current_platform

    known = dict(envs.environment_variables)
    ours = [name for name in known if name.startswith("VLLM_H2O_")]
    for name in ours:
        del known[name]
    monkeypatch.setattr(envs, "environment_variables", known)
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_H2O_CACHE", "/tmp")
    with pytest.raises(ValueError, match="VLLM_H2O_CACHE"):
        current_platform.validate_environ(hard_fail=True)
    early_hook()
    current_platform.validate_environ(hard_fail=True)
    assert known["VLLM_H2O_CACHE"]() == "/tmp"
    assert "VLLM_H2O_KERNELS" not in known
