"""Colours, labels and style sheet that all pictures and pages share."""

from __future__ import annotations

from collections.abc import Collection

from megatron.dpp.trace.vocabulary import IdleCause

THEMES = ("light", "dark")

COLOURS = {
    "bg": ("#f6f7f9", "#14171b"),
    "card": ("#ffffff", "#1c2026"),
    "ink": ("#1b1f24", "#e7eaee"),
    "dim": ("#5d6670", "#9da6b1"),
    "line": ("#dfe3e8", "#343b45"),
    "on": ("#ffffff", "#ffffff"),
    "this": ("#6a3fb5", "#b49af0"),
    "other": ("#7d8792", "#8d97a3"),
    "good": ("#1f7a46", "#5fc78a"),
    "bad": ("#b3403a", "#ee8a80"),
    "F": ("#2b6cb8", "#3f83d1"),
    "B": ("#2c8450", "#3b9c63"),
    "W": ("#d07a1c", "#d98a35"),
    "span": ("#a99fc4", "#6f648f"),
    "tail": ("#a99fc4", "#6f648f"),
    "warm-up": ("#dde1e6", "#3a414a"),
    "drain": ("#ccd2d9", "#474f59"),
    "message": ("#eeb4b0", "#8d4c4a"),
    "memory-cap": ("#e3cf7c", "#85742f"),
    "late-member": ("#d9a9cf", "#7d4a73"),
    "late-leader": ("#c391d6", "#6d4486"),
    "lookahead": ("#a6d2cd", "#3d716c"),
    "host": ("#b9a28f", "#6d5947"),
    "send": ("#e0b8d6", "#7a5571"),
}
"""Name -> colour on a light and on a dark page. F, B and W mean forward, backward and weight
gradient; ``this`` and ``other`` are runs; the last rows are causes of idle time."""

CHUNK_ALPHA = (1.0, 0.68, 0.46, 0.32)
"""Opacity of a task by its chunk: later chunks are paler."""

LABELS = {
    "F": "F: forward",
    "B": "B: backward",
    "W": "W: weight gradient",
    "span": "other work",
    "tail": "after the pipeline",
    **{cause.value: cause.label for cause in IdleCause},
}
"""Class of a bar -> its label in a legend."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


_LETTER = 0.6
"""Width of a character, in font sizes: of a wide font, so that a label is left out, not cut."""


def text_width(text: str, size: float = 12.0) -> float:
    """Width of a text, estimated."""
    return len(text) * size * _LETTER


def colour(name: str, theme: str = "light") -> str:
    """The hexadecimal colour of a name; that of ``other`` for one without a colour."""
    return COLOURS.get(name, COLOURS["other"])[THEMES.index(theme)]


def label_of(name: str) -> str:
    """The label of a class; its name if it has none."""
    return LABELS.get(name, name)


def in_order(names: Collection[str]) -> list[str]:
    """Classes in the order of ``LABELS``, then those without a label."""
    return [name for name in LABELS if name in names] + sorted(set(names) - LABELS.keys())


def style_sheet() -> str:
    """CSS of a page with inline pictures: a variable per colour, light or dark as the reader has
    it, and the classes ``f-NAME`` (fill) and ``s-NAME`` (stroke) of the shapes."""
    light, dark = (
        "".join(f"--{name}:{colour(name, theme)};" for name in COLOURS) for theme in THEMES
    )
    classes = "\n".join(
        f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in COLOURS
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{classes}\n"
    )
