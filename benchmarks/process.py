"""Runs a function in a fresh process: JSON in, JSON out.

An engine's memory, threads and environment are gone when its process ends, so
systems that run one after the other do not feel each other.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Environment of an engine's process, unless the caller's has its own."""


def run_in_process(
    target: str, job: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> Any:
    """Call `target` in a process of its own.

    Args:
        target: `"package.module:function"`, called with `job`.
        job: The only argument; must be JSON.
        env: Variables set on top of this process's.

    Returns:
        What the function returned; must be JSON.

    Raises:
        subprocess.CalledProcessError: The function raised; its traceback is
            on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "job.json", Path(folder) / "result.json"
        given.write_text(json.dumps(job))
        command = [sys.executable, "-m", __spec__.name, target, given, result]
        env = ENGINE_ENV | os.environ | dict(env or {})
        subprocess.run([str(part) for part in command], env=env, check=True)
        return json.loads(result.read_text())


def main(target: str, given: str, result: str) -> None:
    """Inside the process: load, call, write."""
    module, function = target.split(":")
    job = json.loads(Path(given).read_text())
    value = getattr(importlib.import_module(module), function)(job)
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
