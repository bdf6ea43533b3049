"""Call a function when a module has been imported.

Target: Python's import of one module.
Why: vLLM looks for platform plugins either before it imports the module that we
    extend, or in the middle of that import (`from vllm import EngineArgs`).
How: `importlib` clears `_initializing` on a module's spec as the very last thing
    of its import; the spec gets a subclass that notices. Nothing else changes.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` once `name` is imported, now if it is already.

    Idempotent for a name.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None:
        if not any(isinstance(f, _Finder) and f.name == name for f in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, callback))
    elif spec is not None and getattr(spec, "_initializing", False):
        _watch(spec, callback)
    else:
        callback(module)


class _WatchedSpec(ModuleSpec):
    """Tells when the import of its module is over."""

    callback: Callback

    @property
    def _initializing(self) -> bool:
        return self.__dict__["_initializing"]

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        module = sys.modules.get(self.name)
        # A failed import has left sys.modules by now.
        if not value and module is not None and hasattr(self, "callback"):
            callback = self.callback
            del self.callback
            callback(module)


def _watch(spec: ModuleSpec, callback: Callback) -> None:
    if not isinstance(spec, _WatchedSpec):
        spec.__class__ = _WatchedSpec
        assert isinstance(spec, _WatchedSpec)
        spec.callback = callback


class _Finder(importlib.abc.MetaPathFinder):
    """Steps aside for the one import that it waits for."""

    def __init__(self, name: str, callback: Callback) -> None:
        self.name, self.callback = name, callback

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            _watch(spec, self.callback)
        return spec
