"""Say what pip can not install and this machine lacks, before anything is installed."""

import ctypes
import os
import shutil
import sys
import sysconfig
from pathlib import Path


def missing():
    """What is missing, and why it is needed; Debian's package in brackets."""
    if sys.version_info < (3, 11):  # noqa: UP036  any Python may run this
        yield f"Python >= 3.11: this is {sys.version.split()[0]}"
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        yield "the module venv (python3-venv): everything is installed into .venv"
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        yield "libnuma.so.1 (libnuma1): vLLM on CPU loads it"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        yield "a C compiler (gcc): it builds the kernels"
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        yield "a C++ compiler (g++): vLLM on CPU compiles the model with it"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        yield "Python.h (python3-dev): so does vLLM with this"
    if not shutil.which("patch"):
        yield "patch (patch): tests apply what is in patches/"


if __name__ == "__main__":
    if lacking := list(missing()):
        sys.exit("Install first:\n  " + "\n  ".join(lacking))
