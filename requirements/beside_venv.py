"""Makes an environment that sees all of `.venv`, and what is installed beside it."""

from __future__ import annotations

import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make(folder: Path) -> tuple[Path, Path]:
    """The folders of packages of `.venv`, and of the new environment."""
    (base,) = (ROOT / ".venv" / "lib").glob("python3*/site-packages")
    venv.create(folder, symlinks=True, clear=True, with_pip=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    return base, site
