"""The drawings of docs: what runs where, and what becomes of a request's blocks.

    python -m benchmarks.drawings            # writes docs/pictures/*.svg

They have the reader's colours, light or dark, and need no font of their own.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from benchmarks.pictures import FOLDER
from vllm_h2o.policy.layout import place_of

_STYLE = """
text { font: 15px Helvetica, Arial, sans-serif; fill: #1e293b }
.head { font-weight: bold; font-size: 17px }
.note { font-size: 13px; fill: #475569 }
.middle { text-anchor: middle }
.paper { fill: #ffffff }
.box { fill: #f1f5f9; stroke: #334155 }
.ours { fill: #fed7aa; stroke: #9a3412 }
.dense { fill: #bfdbfe; stroke: #1e3a8a }
.held { fill: #fdba74; stroke: #9a3412 }
.null { fill: none; stroke: #94a3b8; stroke-dasharray: 3 3 }
.line { fill: none; stroke: #334155; stroke-width: 1.5; marker-end: url(#tip) }
#tip path { fill: #334155 }
@media (prefers-color-scheme: dark) {
text { fill: #e2e8f0 } .note { fill: #94a3b8 }
.paper { fill: #0f172a }
.box { fill: #1e293b; stroke: #94a3b8 }
.ours { fill: #7c2d12; stroke: #fdba74 }
.dense { fill: #1e3a8a; stroke: #93c5fd }
.held { fill: #9a3412; stroke: #fdba74 }
.line { stroke: #cbd5e1 } #tip path { fill: #cbd5e1 }
}
"""


class Drawing:
    """An SVG, drawn from the left above; all lengths are its units."""

    def __init__(self, title: str, width: int, height: int) -> None:
        """Begin with an empty sheet."""
        self._title, self._size, self._parts = title, (width, height), list[str]()

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write a line; `kind` are classes of `_STYLE`."""
        self._parts.append(
            f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, *lines: str
    ) -> None:
        """Draw a box with lines of text in its middle, the first of them bold."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" '
            f'class="{kind}"/>'
        )
        top = y + height / 2 + 5 - 10 * (len(lines) - 1)
        for i, line in enumerate(lines):
            is_head = i == 0 and len(lines) > 1
            style = "head middle" if is_head else "middle"
            self.text(x + width / 2, top + 20 * i, line, style)

    def cells(
        self, x: float, y: float, kinds: str, *names: str, size: int = 34
    ) -> None:
        """Draw a row of blocks: d(ense), h(eld), n(ull)."""
        kind = {"d": "dense", "h": "held", "n": "null"}
        for i, letter in enumerate(kinds):
            name = names[i : i + 1]
            self.box(x + i * size, y, size - 4, size - 4, kind[letter], *name)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line with a tip through points."""
        path = " L".join(f"{x},{y}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="line"/>')

    def svg(self) -> str:
        """All of it."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style>"
            '<defs><marker id="tip" markerWidth="9" markerHeight="9" refX="7" '
            'refY="3.5" orient="auto"><path d="M0,0 L8,3.5 L0,7 z"/></marker></defs>'
            f'<rect width="{width}" height="{height}" class="paper"/>'
            + "\n".join(self._parts)
            + "</svg>\n"
        )


def processes() -> Drawing:
    """vLLM's three processes, where the add-on is in them, and what travels."""
    it = Drawing("vLLM's processes and what H2O adds to them", 1000, 330)
    for x, name, ours, does in (
        (20, "front end", "options, checks, metrics", "plugin"),
        (370, "engine core", "scheduler, block manager", "core, policy: counts"),
        (
            720,
            "worker, one per rank",
            "attention backend, kernels",
            "attention: chooses",
        ),
    ):
        it.box(x, 20, 260, 230, "box")
        it.text(x + 130, 48, name, "head middle")
        it.box(x + 20, 70, 220, 70, "ours", does, ours)
    it.box(40, 165, 220, 60, "box", "vLLM's server, LLM")
    it.box(390, 165, 220, 60, "box", "vLLM's pool, prefix cache")
    it.box(740, 165, 220, 60, "box", "vLLM's model, KV cache")
    it.arrow((280, 90), (366, 90))
    it.arrow((370, 125), (284, 125))
    it.arrow((630, 90), (716, 90))
    it.arrow((720, 125), (634, 125))
    it.text(323, 80, "h2o_*", "note middle")
    it.text(323, 145, "counters", "note middle")
    it.text(673, 80, "plan, copies", "note middle")
    it.text(673, 145, "seconds", "note middle")
    it.text(
        20, 285, "A plan has a row of counts for each request. No score, no position "
        "and no key leaves a worker:",
    )  # fmt: skip
    it.text(
        20, 307, "which tokens stay differs by KV head, how many slots are held does "
        "not, so that the scheduler counts alone.",
    )  # fmt: skip
    return it


def life() -> Drawing:
    """What a request goes through."""
    it = Drawing("A request's life", 1000, 400)
    it.box(20, 150, 130, 60, "box", "waiting")
    it.box(270, 150, 170, 60, "dense", "reads", "dense blocks")
    it.box(560, 150, 190, 60, "held", "resident", "slots of a budget")
    it.box(560, 290, 190, 60, "dense", "stays dense", "stock's, to its end")
    it.box(850, 150, 130, 60, "box", "ended")
    it.box(560, 20, 190, 60, "held", "snapshot", "kept for others")
    it.arrow((150, 180), (264, 180))
    it.text(207, 170, "admitted", "note middle")
    it.arrow((440, 180), (554, 180))
    it.text(497, 170, "compressed", "note middle")
    it.arrow((500, 210), (500, 235), (420, 235), (420, 216))
    it.text(460, 255, "next chunk", "note middle")
    it.arrow((355, 210), (355, 320), (554, 320))
    it.text(365, 342, "fits its budget, ends with its", "note")
    it.text(365, 360, "first token, or asks for it", "note")
    it.arrow((750, 180), (844, 180))
    it.arrow((750, 320), (915, 320), (915, 216))
    it.arrow((720, 210), (720, 240), (780, 240), (780, 195), (756, 195))
    it.text(790, 245, "grows", "note")
    it.arrow((655, 150), (655, 86))
    it.text(665, 125, "--h2o-keep", "note")
    it.arrow((560, 50), (300, 50), (300, 144))
    it.text(310, 70, "another goes on from it", "note")
    it.arrow((600, 210), (600, 270), (85, 270), (85, 216))
    it.text(95, 262, "preempted, whatever it holds: read again", "note")
    return it


def block_row() -> Drawing:
    """A request's row of vLLM's block table in four states."""
    it = Drawing("A row of the block table", 1000, 330)
    rows = (
        ("reads", "dddddd", "one block for 16 of its tokens, shared by prefix hits"),
        (
            "compressed",
            "ddddddnnnnhhh",
            "both, in the step that reads the prompt's last token",
        ),
        ("resident", "nnnnnnnnnnhhh", "its dense blocks are vLLM's again"),
        ("grown", "nnnnnnnnnnhhhh", "one more for every head, laid out anew"),
    )
    it.text(230, 26, "columns for the prompt of the longest request", "note")
    it.text(572, 26, "resident blocks", "note")
    for i, (name, kinds, said) in enumerate(rows):
        y = 48 + 68 * i
        it.text(20, y + 22, name, "head")
        it.cells(230, y, kinds)
        it.text(230, y + 48, said, "note")
    return it


def lent_pages() -> Drawing:
    """Budgets by head in blocks that are as even as before."""
    it = Drawing("Pages that heads of all layers share", 1000, 330)
    it.text(20, 36, "what heads need", "head")
    it.text(520, 36, "where it lies: equally many blocks in every layer", "head")
    needs = ("A", 1), ("B", 4), ("C", 5), ("D", 2)
    for i, (letter, count) in enumerate(needs):
        it.text(20, 78 + 60 * i, f"layer {i // 2}, head {i % 2}")
        it.cells(150, 56 + 60 * i, "h" * count, *letter * count)
    for i, owners in enumerate(("ACC", "BBB", "CCC", "DDB")):
        y = 60 + 120 * (i // 2) + 38 * (i % 2)
        it.cells(610, y, "hhh", *owners)
        it.text(730, y + 22, f"pages of its head {i % 2}", "note")
        if not i % 2:
            it.text(520, y + 42, f"layer {i // 2}")
    it.text(
        20, 318, "A head that needs fewer pages lends them to the same head of another "
        "layer, by a list that is made once.", "note",
    )  # fmt: skip
    return it


def growth() -> Drawing:
    """Places of tokens before and after a budget grows."""
    before, grown_at, more = 8, 24, 12
    it = Drawing("A budget that grows", 1000, 250)
    it.text(20, 34, f"budget {before}: the token at position p takes place p", "head")
    leaves = "its slot is that of the token that leaves the window"
    it.text(20, 56, f"once {before} are held, {leaves}", "note")
    it.cells(20, 70, "h" * before, *map(str, range(before)), size=40)
    it.text(
        20, 150, f"with {grown_at} tokens the budget becomes {more}: what is held is "
        "put in order, then places go on", "head",
    )  # fmt: skip
    places = [place_of(grown_at + i, grown_at, before) for i in range(more - before)]
    it.cells(20, 170, "h" * before + "d" * len(places), *map(str, range(more)), size=40)
    at = ", ".join(
        f"position {grown_at + i} takes place {p}" for i, p in enumerate(places[:2])
    )
    it.text(20 + 40 * before, 230, f"new places: {at} ..", "note")
    return it


DRAWINGS = {
    "processes": processes,
    "life": life,
    "block_row": block_row,
    "lent_pages": lent_pages,
    "growth": growth,
}


def main(folder: Path = FOLDER) -> None:
    """Write all of them."""
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
