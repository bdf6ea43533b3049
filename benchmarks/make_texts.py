"""Cuts the texts that an engine reads to measure its heads, out of Debian packages.

    python -m benchmarks.make_texts

They are in the public domain, as the packages' copyright files say, and none of them is
a source of `benchmarks/quality`. The results are in the repository: this says how they
came about.
"""

from __future__ import annotations

import re
import struct
import zlib

from benchmarks.packages import debian
from vllm_h2o.calibration.texts import FOLDER

CHARACTERS = 11_500
"""Of a text: over 2048 tokens, with a vocabulary of 262,144 too."""
FIRST_BOOK = 1
"""Of the index of a SWORD module; 0 has the module's title."""


def main() -> None:
    """Write the files."""
    english = _first_book("sword-text-web", "engWEB2015eb")
    spanish = _first_book("sword-text-sparv", "spaRV1909eb")
    starts = {
        "narrative-en": (english, english.index("Now Yahweh said to Abram, “Leave")),
        "narrative-es": (spanish, spanish.index(". ", len(spanish) // 4) + 2),
    }
    for name, (text, start) in starts.items():
        cut = text[start : start + CHARACTERS]
        (FOLDER / f"{name}.txt").write_text(cut)


def _first_book(package: str, module: str) -> str:
    """The text of the first book of a SWORD module, without its markup."""
    (data,) = debian(package).rglob(f"{module}/ot.bzz")
    entry = data.with_suffix(".bzs").read_bytes()[12 * FIRST_BOOK :][:8]
    start, size = struct.unpack("<II", entry)
    markup = zlib.decompress(data.read_bytes()[start : start + size]).decode()
    text = re.sub(r"<note.*?</note>", "", markup, flags=re.DOTALL)
    text = re.sub(r"</?(p|l|lg|div|title|verse|chapter)\b[^>]*>", " ", text)
    return " ".join(re.sub(r"<[^>]*>", "", text).split())


if __name__ == "__main__":
    main()
