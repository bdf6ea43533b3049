"""Systems that stay up between their turns, each in a process of its own.

A turn then is one run of the workload instead of an engine's life, so there can be
many, and two that are compared lie seconds apart: on a machine whose speed drifts
that tells differences of a percent. Between its turns a system is stopped by signal:
the threads of an idle engine spin for work.

An engine can be faster or slower than its twin for as long as it lives, so systems
may be started anew every so many turns.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from benchmarks.process import ENGINE_ENV
from benchmarks.systems import Job, samples, start

_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class _System:
    """A system that is up; `turns` are those that it has had."""

    job: Job
    process: Any
    connection: Connection
    turns: int = 0

    def end(self) -> None:
        self.connection.close()
        if self.process.is_alive():
            os.killpg(self.process.pid, signal.SIGCONT)
        self.process.join()


class LiveSystems:
    """Measures jobs; the system of a job that it knows is up already.

    Use it as a context: its end is the systems' end.
    """

    def __init__(self, env: Mapping[str, str], restart_every: int | None = None):
        """Systems get `env` on top of this process's environment, and end after
        `restart_every` turns, if that is given."""
        self._env = ENGINE_ENV | os.environ | dict(env)
        self._restart_every = restart_every
        self._live: list[_System] = []

    def __enter__(self) -> LiveSystems:
        return self

    def __call__(self, job: Job) -> list[dict[str, Any]]:
        """One turn.

        Raises:
            RuntimeError: The system's process ended; its traceback is on stderr.
        """
        system = self._find(job)
        try:
            system.connection.send(True)
            found = system.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{job.system} ended: see its error above") from error
        system.turns += 1
        if system.turns == self._restart_every:
            self._live.remove(system)
            system.end()
        else:
            os.killpg(system.process.pid, signal.SIGSTOP)
        return found

    def _find(self, job: Job) -> _System:
        for system in self._live:
            if system.job == job:
                os.killpg(system.process.pid, signal.SIGCONT)
                return system
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(job, theirs, dict(self._env)))
        process.start()
        theirs.close()
        self._live.append(_System(job, process, ours))
        return self._live[-1]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for system in self._live:
            system.end()


def _serve(job: Job, connection: Connection, env: dict[str, str]) -> None:
    """Inside the process: a run per message, until there are no more."""
    # Of its own, to be stopped; in the parent's session still, so that the kernel
    # ends what is stopped when the parent dies.
    os.setpgrp()
    os.environ.update(env)
    system = start(job)
    try:
        while connection.recv():
            connection.send(samples(system, job))
    except EOFError:
        pass
    finally:
        system.close()
