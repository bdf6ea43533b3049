"""Where models and texts come from: PyPI's and Debian's packages, never a hub."""

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
from pathlib import Path

from vllm_h2o.core.cache import cache_root

SECONDS = 300
"""The longest that fetching may take."""


def pypi(module: str, fix: str) -> Path:
    """Folder of an installed module, without importing it.

    Raises:
        FileNotFoundError: It is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {module} is not installed; fix: {fix}")
    return Path(next(iter(spec.submodule_search_locations)))


def debian(package: str) -> Path:
    """Root of an unpacked Debian package, fetched on first use, without root.

    Raises:
        FileNotFoundError: It could not be fetched.
    """
    target = cache_root() / "texts" / package
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        try:
            fetch = f"apt-get download -qq {package} && dpkg -x *.deb unpacked"
            subprocess.run(fetch, shell=True, cwd=name, check=True, timeout=SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise FileNotFoundError(
                f"Debian's package {package} could not be fetched ({error}); fix: run "
                f"on Debian or Ubuntu, or unpack the package into {target}"
            ) from error
        try:
            (Path(name) / "unpacked").rename(target)
        except OSError:
            if not target.exists():  # else another process was first
                raise
    return target
