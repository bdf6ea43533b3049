"""Makes an environment with vLLM's own tests, of the release that `.venv` has.

    python requirements/vllm_tests.py 0.32.0 [FOLDER]

FOLDER/tests has them, from the source archive on PyPI, and FOLDER/bin/python sees all
of `.venv`, and what they need beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

from beside_venv import ROOT, make

NEEDED = (
    "pytest-asyncio==1.5.0",
    "tblib==3.2.2",
    "setuptools>=80",
    "setuptools-rust",
    "setuptools-scm",
)
"""By the tests; and by `pip download`, which has a source archive say its name."""


def main() -> None:
    """Make the environment."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version")
    parser.add_argument("folder", nargs="?", type=Path)
    args = parser.parse_args()
    folder = args.folder or ROOT / f".venv-tests-{args.version}"
    make(folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", *NEEDED], check=True)
    env = os.environ | {
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": args.version,
    }
    with tempfile.TemporaryDirectory() as downloads:
        download = [*pip, "download", "--no-deps", "--no-build-isolation"]
        download += ["--no-binary", "vllm", "-d", downloads, f"vllm=={args.version}"]
        subprocess.run(download, check=True, env=env)
        (archive,) = Path(downloads).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            root = f"vllm-{args.version}/"
            for member in opened.getmembers():
                inside = member.name.removeprefix(root)
                if inside == "pyproject.toml" or inside.startswith("tests/"):
                    member.name = inside
                    opened.extract(member, folder / "tests", filter="data")
    print(f"{folder}/tests has the tests of vLLM {args.version}")


if __name__ == "__main__":
    main()
