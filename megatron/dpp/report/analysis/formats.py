"""Numbers as text, for sentences, pages and the terminal."""

from __future__ import annotations


def duration(ms: float) -> str:
    """A time with four digits: ``13.05 s``, ``930.7 ms``, ``4.215 ms``, ``31.2 us``."""
    size = abs(ms)
    if size >= 999.95:
        return f"{ms / 1e3:.2f} s" if size < 99_995 else f"{ms / 1e3:.0f} s"
    if size >= 9.9995:
        return f"{ms:.1f} ms"
    return f"{ms:.3f} ms" if size >= 0.1 or not ms else f"{ms * 1e3:.1f} us"


def percent(share: float) -> str:
    """A share: ``12.3 %``."""
    return f"{share * 100:.1f} %"


def number(value: float) -> str:
    """A plain number, as short as its size allows: ``4,218``, ``62.1``, ``4.83``, ``0.0213``."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 20 else f"{value:.3g}"


def mebibytes(size: float) -> str:
    """Bytes: ``512 MiB``, ``12.3 GiB``."""
    mib = size / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 10_000 else f"{mib:,.0f} MiB"


def time_left(seconds: float) -> str:
    """A time to wait for: ``45 s``, ``12 min``, ``3 h 05 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
