"""Draws a terminal's transcript as an animated SVG: python tools/make_demo.py demo.txt demo.svg

A line that begins with ``$ `` is typed, a line ``~ SECONDS`` waits, all others appear at once.
Old lines leave at the top. The animation is CSS alone, so that it runs where scripts do not.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass
from pathlib import Path

_WIDTH, _LINE, _COLUMN = 860, 19, 8.05
"""Pixels of the picture's width, of a line and of a character."""
_SHOWN = 22
"""Lines of the terminal."""
_TYPED, _LATER = 0.03, 0.12
"""Seconds per character that is typed, and between lines of output."""
_REST = 4.0
"""Seconds that the end is shown before the animation begins again."""


@dataclass(frozen=True)
class Line:
    """A line of the transcript, which appears at ``begin`` seconds and is whole at ``end``."""

    text: str
    begin: float
    end: float


def lines_of(transcript: str) -> list[Line]:
    """The lines of a transcript with their times."""
    found, now = [], 0.5
    for text in transcript.splitlines():
        if text.startswith("~ "):
            now += float(text[2:])
            continue
        end = now + _TYPED * len(text) if text.startswith("$ ") else now
        found.append(Line(text, now, end))
        now = end + (0.4 if text.startswith("$ ") else _LATER)
    return found


def drawn(lines: list[Line]) -> str:
    """The SVG."""
    whole = lines[-1].end + _REST
    columns, height = int((_WIDTH - 32) / _COLUMN), _SHOWN * _LINE + 52
    styles, texts = [], []
    for number, line in enumerate(lines):
        y = 52 + number * _LINE
        shown, share = html.escape(line.text[:columns]), 100 * line.begin / whole
        styles.append(
            f"@keyframes l{number}{{0%,{share:.2f}%{{opacity:0}}"
            f"{min(share + 0.01, 100):.2f}%,100%{{opacity:1}}}}"
            f"#l{number}{{animation:l{number} {whole:.2f}s infinite}}"
        )
        kind = ' class="c"' if line.text.startswith("$ ") else ""
        texts.append(f'<text id="l{number}" x="16" y="{y}"{kind}>{shown}</text>')
        if line.end > line.begin:  # a cover that gives the characters free one by one
            width = _COLUMN * (len(line.text) + 1)
            styles.append(
                f"@keyframes t{number}{{0%,{share:.2f}%{{transform:translateX(0)}}"
                f"{100 * line.end / whole:.2f}%,100%{{transform:translateX({width:.0f}px)}}}}"
                f"#t{number}{{animation:t{number} {whole:.2f}s linear infinite}}"
            )
            texts.append(
                f'<rect id="t{number}" x="16" y="{y - 14}" width="{_WIDTH}" height="{_LINE}"/>'
            )
    steps = [
        (100 * line.begin / whole, (number - _SHOWN + 1) * _LINE)
        for number, line in enumerate(lines)
        if number >= _SHOWN
    ]
    scroll = "".join(f"{share:.2f}%{{transform:translateY({-y}px)}}" for share, y in steps)
    last = steps[-1][1] if steps else 0
    styles.append(
        f"@keyframes s{{0%{{transform:translateY(0)}}{scroll}100%"
        f"{{transform:translateY({-last}px)}}}}"
        f"#s{{animation:s {whole:.2f}s steps(1,jump-end) infinite}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">'
        "<style>text{font:13.4px ui-monospace,Menlo,Consolas,monospace;fill:#d0d7de;"
        "white-space:pre}.c{fill:#7ee787}rect{fill:#0d1117}"
        + "".join(styles)
        + f'</style><rect width="{_WIDTH}" height="{height}" rx="8"/>'
        f'<svg y="38" width="{_WIDTH}" height="{height - 46}" '
        f'viewBox="0 38 {_WIDTH} {height - 46}">'
        f'<g id="s">{"".join(texts)}</g></svg>'
        '<circle cx="20" cy="16" r="5" fill="#ff5f56"/><circle cx="38" cy="16" r="5" '
        'fill="#ffbd2e"/><circle cx="56" cy="16" r="5" fill="#27c93f"/></svg>\n'
    )


def main() -> int:
    """Draw the transcript given on the command line."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    lines = lines_of(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(drawn(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
