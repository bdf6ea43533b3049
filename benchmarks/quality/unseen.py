"""Texts that nothing here was made or tuned on, into a folder.

    python -m benchmarks.quality.unseen FOLDER [--kinds ruby perl go css]
    python -m benchmarks.quality --texts FOLDER --output FILE

A kind is one file of a Debian package that nothing else here reads, from a quarter of
it on: past the licence and the contents. They were chosen when all that is measured on
them was fixed. Since then one choice was made on the first set, so that only the
second is unseen still.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.packages import debian
from benchmarks.quality.texts import plain

CHARACTERS = 65_000
"""Of a text, at most: enough for 8128 tokens."""
FIRST = {
    "ruby": ("libruby3.1", "3.1.0/optparse.rb"),
    "perl": ("perl-modules-5.36", "5.36.0/perl5db.pl"),
    "go": ("golang-1.19-src", "net/http/server.go"),
    "css": ("libjs-bootstrap4", "dist/css/bootstrap.css"),
    "devices": ("pci.ids", "misc/pci.ids"),
    "quotes": ("fortunes", "fortunes/people"),
    "spanish": ("aptitude-doc-es", "es/ch02s04s05.html"),
    "reference": ("postgresql-doc-15", "html/app-psql.html"),
}
"""Package and end of the file's path, by kind. How layers are weighed in a head profile
was chosen on these."""
SECOND = {
    "javascript": ("libjs-jquery", "jquery/jquery.js"),
    "tcl": ("libtcl8.6", "tcl8.6/clock.tcl"),
    "shell": ("debootstrap", "debootstrap/functions"),
    "sql": ("postgresql-15", "15/information_schema.sql"),
    "xml": ("shared-mime-info", "packages/freedesktop.org.xml"),
    "french": ("aptitude-doc-fr", "fr/ch02s04s05.html"),
    "essays": ("anarchism", "html/secA5.html"),
    "regions": ("iso-codes", "json/iso_3166-2.json"),
}
"""Nothing was chosen on these."""
KINDS = FIRST | SECOND


def unseen_text(kind: str) -> str:
    """The text of a kind.

    Raises:
        FileNotFoundError: The package could not be fetched.
        ValueError: It has not exactly one such file.
    """
    package, path = KINDS[kind]
    files = [file for file in debian(package).rglob(path) if not file.is_symlink()]
    if len(files) != 1:
        raise ValueError(f"Debian's {package} has {len(files)} files {path}, not one")
    text = files[0].read_text(errors="replace")
    if files[0].suffix == ".html":
        text = plain(text)
    start = text.index("\n", len(text) // 4) + 1
    return text[start : start + CHARACTERS]


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(SECOND))
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        (args.folder / f"{kind}.txt").write_text(unseen_text(kind))
        print(args.folder / f"{kind}.txt")


if __name__ == "__main__":
    main()
