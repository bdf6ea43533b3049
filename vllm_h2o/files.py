"""The files of the commands, checked before an engine starts for minutes."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from vllm_h2o.policy.options import shortened


def check_output(parser: argparse.ArgumentParser, path: Path) -> None:
    """End the command where its result could not be written to a file."""
    option = f"--output is {shortened(path)}"
    try:
        if path.is_dir():
            parser.error(f"{option}, a folder: name a file in it")
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        parser.error(
            f"{option}, in whose folder nothing can be written ({error.strerror}): "
            "name a file in a folder that is there and can be written"
        )


def text_of(parser: argparse.ArgumentParser, option: str, path: Path) -> str:
    """The text of a file of the user's; the command ends where there is none."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        parser.error(
            f"{option} is {shortened(path)}, which can not be read as text in UTF-8 "
            f"({why}): name a file that can"
        )
