"""Call a function when a module has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` once `name` is imported, now if it is already."""
    module = sys.modules.get(name)
    if module is not None and not _is_loading(module):
        callback(module)
        return
    if module is not None:
        raise RuntimeError(
            f"{name} is being imported already, too late to extend it: import vllm "
            "before its submodules, or use --scheduler-cls, --worker-cls and "
            "--additional-config (README, 'without the hook')"
        )
    if not any(isinstance(f, _Finder) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, callback))


def _is_loading(module: ModuleType) -> bool:
    return getattr(module.__spec__, "_initializing", False)


class _Finder(importlib.abc.MetaPathFinder):
    """Steps aside after the one import that it waits for."""

    def __init__(self, name: str, callback: Callback) -> None:
        self.name, self.callback = name, callback

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.callback)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, callback: Callback) -> None:
        self._loader, self._callback = loader, callback

    def __getattr__(self, name: str):
        # Resource and source look-ups go to the real loader.
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec):
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)
