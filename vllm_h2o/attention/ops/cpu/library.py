"""The C kernels as a library: built with the system's compiler, kept in a cache.

A file is named by what it is built from (sources, flags, processor), by its compiler
and by a digest of its own content, so that a damaged one is not loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm.logger import init_logger

from vllm_h2o.core.folders import CACHE, cache_root
from vllm_h2o.policy.options import shortened, shown

logger = init_logger(f"vllm.{__name__}")

_SOURCES = Path(__file__).parents[2] / "csrc"
# Sums may be reordered so that they vectorize; divisions must stay exact, and
# comparisons of infinities defined, so no -ffast-math.
_FLAGS = (
    "-shared -fPIC -O3 -march=native -fopenmp -fno-math-errno "
    "-fno-trapping-math -fassociative-math -fno-signed-zeros"
).split()
if platform.machine() == "x86_64":
    # gcc's own choice for Intel's is 256 bits, also beside the kernels' vectors of 512.
    _FLAGS.append("-mprefer-vector-width=512")


def load(*flags: str) -> ctypes.CDLL:
    """Load the kernels, building them where the cache has no sound copy.

    Args:
        flags: More flags of the compiler, for variants to measure.

    Raises:
        RuntimeError: There is no compiler, or it failed, or neither the cache nor the
            temporary folder can be used.
    """
    if (cached := _from_cache(flags)) is not None:
        return cached
    try:
        with _scratch() as folder:
            built = Path(folder) / "h2o_decode.so"
            compile_source(_SOURCES / "decode.c", built, *flags)
            try:
                return _opened(_keep(built, flags))
            except OSError as error:
                _warn(error)
            return _opened(built)
    except OSError as error:
        raise RuntimeError(
            f"H2O can not build and load its kernel in the cache ({CACHE}), nor in the "
            f"temporary folder (TMPDIR): {shortened(error)}. Set one of them to a "
            "folder that can be written, on a file system without noexec"
        ) from error


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder to build in: a temporary one, or in the cache where there is none."""
    try:
        return tempfile.TemporaryDirectory(prefix="vllm_h2o_")
    except OSError:
        _folder().mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=_folder())


def _opened(path: Path) -> ctypes.CDLL:
    # torch has loaded its OpenMP by now; the same soname makes ours resolve to
    # it, so both share one pool of threads.
    return ctypes.CDLL(str(path))


def _warn(error: OSError) -> None:
    logger.warning_once(
        "H2O can not keep its kernel (%s: %s) and builds it at each start: set %s to a "
        "folder that can be written, on a file system without noexec",
        CACHE, shortened(error), CACHE,
    )  # fmt: skip


def compiler() -> list[str]:
    """The command of the C compiler: `$CC`, else the system's.

    Raises:
        RuntimeError: There is none.
    """
    if found := _compiler():
        return found
    if named := os.environ.get("CC"):
        raise RuntimeError(
            f"H2O on CPU needs a C compiler to build its kernel, and CC is "
            f"{shown(named)}, which is none: set CC to gcc or clang, or unset it"
        )
    raise RuntimeError(
        "H2O on CPU needs a C compiler to build its kernel and found none: "
        "install gcc or clang, or set CC to one"
    )


def compiler_name() -> str:
    """The compiler's path, for messages about a library."""
    return (_compiler() or ["the compiler that built them"])[0]


def _compiler() -> list[str] | None:
    named = os.environ.get("CC")
    for command in [named] if named else ["cc", "gcc", "clang"]:
        try:
            program, *options = shlex.split(command)
        except ValueError:
            return None
        if found := shutil.which(program):
            return [found, *options]
    return None


def _compiler_digest() -> str:
    """Digits that change with the compiler's command, and when it is replaced."""
    program, *options = compiler()
    real = Path(program).resolve()
    state = real.stat()
    parts = [program, *options, str(real), str(state.st_size), str(state.st_mtime_ns)]
    return _digest("\n".join(parts).encode())


def _from_cache(flags: Sequence[str]) -> ctypes.CDLL | None:
    """The kernels by a sound file of the cache; without a compiler, of any's."""
    try:
        by = _compiler_digest() if _compiler() else "*"
        files = sorted(_folder().glob(f"{_built_from(flags)}-{by}-*.so"))
    except OSError:
        return None
    for path in files:
        try:
            if path.stem.endswith(f"-{_digest(path.read_bytes())}"):
                return _opened(path)
            logger.warning_once("H2O removes %s, which is damaged", path)
            path.unlink(missing_ok=True)
        except OSError as error:  # gone meanwhile, unreadable, noexec
            logger.debug("H2O does not load %s: %s", path, error)
    return None


def _keep(built: Path, flags: Sequence[str]) -> Path:
    """Copy a file into the cache: whole, also where others do the same."""
    content = built.read_bytes()
    digests = _compiler_digest(), _digest(content)
    target = _folder() / "-".join([_built_from(flags), *digests])
    target = target.with_name(f"{target.name}.so")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        partial = Path(folder) / target.name
        partial.write_bytes(content)
        partial.rename(target)
    return target


def _folder() -> Path:
    return cache_root() / "kernels"


def _built_from(flags: Sequence[str]) -> str:
    """What a file's name begins with."""
    parts = [source.read_bytes() for source in sorted(_SOURCES.iterdir())]
    parts += ["\n".join([*_FLAGS, *flags, _processor()]).encode()]
    return f"h2o_decode-{_digest(*parts)}"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "Features")
    return "".join(sorted({line for line in lines if line.startswith(keys)}))


def compile_source(source: Path, target: Path, *flags: str) -> None:
    """Compile one C file to a shared object, with the kernels' flags and more.

    Raises:
        RuntimeError: There is no compiler, or it failed; with what it said.
    """
    command = [*compiler(), *_FLAGS, *flags, str(source), "-o", str(target), "-lm"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(
            f"H2O can not run the C compiler {command[0]} ({error.strerror}): set CC "
            "to gcc or clang"
        ) from error
    if result.returncode:
        raise RuntimeError(
            f"building the H2O kernel failed: {' '.join(command)}\n{result.stderr}"
        )
