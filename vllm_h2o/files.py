"""The files of the commands, checked before an engine starts for minutes."""

from __future__ import annotations

import argparse
import errno
import os
import tempfile
from pathlib import Path

from vllm_h2o.policy.files import write_whole
from vllm_h2o.policy.options import shortened


def check_output(parser: argparse.ArgumentParser, path: Path) -> None:
    """End the command where its result could not be written to a file."""
    try:
        if path.is_dir():
            fix = "a folder: give --output a file in it"
            parser.error(f"--output is {shortened(path)}, {fix}")
        if path.exists() and not path.is_file():  # a device
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        folder = path.resolve().parent
        with tempfile.TemporaryFile(dir=folder):
            pass
        if len(os.fsencode(path.name)) > os.pathconf(folder, "PC_NAME_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except OSError as error:
        _refuse(parser, path, error)


def write_output(parser: argparse.ArgumentParser, path: Path, text: str) -> None:
    """Write the result of a command; the command ends where that fails."""
    try:
        write_whole(path, text)
    except OSError as error:
        _refuse(parser, path, error)


def _refuse(parser: argparse.ArgumentParser, path: Path, error: OSError) -> None:
    parser.error(
        f"--output is {shortened(path)}, which can not be written "
        f"({error.strerror or error}): give --output a file in a folder that is there "
        "and can be written"
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
