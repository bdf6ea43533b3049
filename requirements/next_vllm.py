"""Makes an environment with a vLLM that has no CPU build yet, out of the one that has.

    python requirements/next_vllm.py 0.33.0 [FOLDER]

The Python of that vLLM, from its wheel on PyPI, lies over the compiled CPU extension of
the vLLM in `.venv`. All else is `.venv`'s. So it shows whether H2O fits the new Python,
not whether the new kernels or another torch do; where the two do not fit each other,
stock vLLM fails too, and `python -m vllm_h2o.plugin.seams FOLDER` is what is left.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from beside_venv import ROOT, make

COMPILED = ("_C*.so", "fs_io_C*.so", "spinloop*.so")
"""What the CPU build has of its own."""
LACKING = ("orjson",)
"""What vLLM 0.33's server imports, and 0.32's does not."""
COMMAND = """#!{}
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":  # processes that are spawned import this file
    sys.exit(main())
"""


def main() -> None:
    """Make the environment."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version")
    parser.add_argument("folder", nargs="?", type=Path)
    args = parser.parse_args()
    folder = args.folder or ROOT / f".venv-{args.version}"
    base, site = make(folder)
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", downloads]
        pip += ["--only-binary=:all:", "--platform", "manylinux_2_28_x86_64"]
        subprocess.run([*pip, f"vllm=={args.version}"], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [x for x in archive.namelist() if not x.endswith(".so")]
            archive.extractall(site, names)
    install = [folder / "bin" / "python", "-m", "pip", "install", "--no-deps"]
    subprocess.run([*install, *LACKING], check=True)
    for pattern in COMPILED:
        for built in (base / "vllm").glob(pattern):
            (site / "vllm" / built.name).symlink_to(built)
    command = folder / "bin" / "vllm"
    command.write_text(COMMAND.format(folder.resolve() / "bin" / "python"))
    command.chmod(0o755)
    (folder / "bin" / "py-spy").symlink_to(base.parents[2] / "bin" / "py-spy")
    # vLLM takes the CPU for its platform by its own version.
    info = site / f"vllm-{args.version}.dist-info"
    metadata = (info / "METADATA").read_text()
    old, new = (f"\nVersion: {args.version}{build}\n" for build in ("", "+cpu"))
    assert old in metadata
    (info / "METADATA").write_text(metadata.replace(old, new, 1))
    print(f"{folder}/bin/python has vLLM {args.version} over the CPU build of .venv")


if __name__ == "__main__":
    main()
