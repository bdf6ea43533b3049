"""Watches over tests: what hangs shows its stacks, what is left behind is a failure.

tests/conftest.py has pytest find these. The next engine needs its core and its
memory: whoever leaves a process or an engine's memory fails itself, and not the
test that comes after it.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

STACKS_BEFORE_TIMEOUT = 10
"""Seconds before the time limit of a test in which stacks are shown."""

PROCESSES_END_WITHIN = 60
"""Seconds that processes may take to end, on a slow machine, once they were told."""

_PR_SET_CHILD_SUBREAPER = 36
# A server that was killed does not take its engine with it; this makes such orphans
# children of ours, so that they are found.
ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

_ended: list[tuple[str, weakref.ref[Any]]] = []

# An engine collects garbage seven times, among 800,000 objects that imports have made:
# two thirds of the time that it takes to start and to end. They are set apart, by
# `nothing_is_left_of_a_module`; vLLM would take them back at the end of each engine.
_set_apart = gc.freeze
gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Show the stacks of a test that is about to be out of time."""
    limit = item.config.getoption("timeout") or item.config.getini("timeout")
    if not limit:
        return (yield)
    timer = threading.Timer(float(limit) - STACKS_BEFORE_TIMEOUT, show_stacks)
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def show_stacks() -> None:
    """Print what every thread of this process and its children is doing."""
    for process in [psutil.Process(), *children()]:
        py_spy = str(Path(sys.executable).with_name("py-spy"))
        command = [py_spy, "dump", "--pid", str(process.pid)]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stdout or f"{process}: {done.stderr}", file=sys.stderr, flush=True)


def children() -> list[psutil.Process]:
    """Processes under this one that run, but for what Python keeps for itself."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.resource_tracker" not in command:
            found.append(process)
    return found


def must_be_gone(what: str, *objects: Any) -> None:
    """Say that nothing of this may live on after the test that runs."""
    _ended.extend((what, weakref.ref(each)) for each in objects)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes and memory that a test took are back when it ends."""
    yield from _watch(request)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """And so is what the tests of a module shared."""
    if request.node.get_closest_marker("engine") is not None:
        gc.collect()
        _set_apart()  # no engine lives
    yield from _watch(request)


def _watch(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("engine") is None:
        yield
        return
    before, failed_before = set(children()), request.session.testsfailed
    yield
    left = _after_a_while(before)
    for process in left:
        process.kill()
    held = _held()
    _ended.clear()
    assert not left, f"processes of this test still ran, and were killed: {left}"
    # The traceback of a test that failed holds what the test held.
    failed = request.session.testsfailed > failed_before
    assert failed or not held, f"memory of this test is still held: {held}"


def _after_a_while(before: set[psutil.Process]) -> set[psutil.Process]:
    deadline = time.monotonic() + PROCESSES_END_WITHIN
    while (left := set(children()) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _held() -> set[str]:
    if any(each() is not None for _, each in _ended):
        gc.collect()
    return {what for what, each in _ended if each() is not None}
