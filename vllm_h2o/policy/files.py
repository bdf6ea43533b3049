"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write bytes, or a text in UTF-8, at once, in place of a file that is there.

    What is no regular file, such as a device, is written to as it is.

    Raises:
        OSError: The file can not be written; one that was there is unchanged.
    """
    path = path.resolve()
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    descriptor, partial = tempfile.mkstemp(prefix=".h2o_", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
