"""Possible layouts, and the nearest to one that is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.dpp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of model parallelism; the other ranks are data parallel."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1

    def text(self) -> str:
        """As options of ``train``."""
        words = f"--tp {self.tensor} --pp {self.pipeline}"
        return words + (f" --chunks {self.chunks}" if self.chunks > 1 else "")


def check_layout(
    layout: Layout, world_size: int, num_layers: int, num_heads: int, devices: str
) -> None:
    """Refuse a layout that is not possible.

    Args:
        num_layers: 0 where other flags cut them.
        devices: the option that gives their number, ``--gpus`` or ``--procs``.

    Raises:
        ConfigError: with the nearest possible layout in it.
    """
    problem = _problem(layout, world_size, num_layers, num_heads)
    if problem is None:
        return
    near = nearest_layout(layout, world_size, num_layers, num_heads)
    size = layout.tensor * layout.pipeline
    hint = f"nearest possible: {near.text()}"
    if world_size % size and _problem(layout, size, num_layers, num_heads) is None:
        hint += f", or {devices} {max(1, round(world_size / size)) * size}"
    raise ConfigError(f"{layout.text()}: {problem}; {hint}")


def _problem(layout: Layout, world_size: int, num_layers: int, num_heads: int) -> str | None:
    size, stages = layout.tensor * layout.pipeline, layout.pipeline * layout.chunks
    if world_size % size:
        return f"{layout.tensor} x {layout.pipeline} = {size} does not divide {world_size} ranks"
    if num_heads % layout.tensor:
        return f"{num_heads} attention heads cannot be divided by {layout.tensor}"
    if layout.chunks > 1 and layout.pipeline == 1:
        return "chunks need a pipeline"
    if num_layers % stages:
        return f"{num_layers} layers cannot be divided by {stages} virtual stages"
    return None


def possible_layouts(world_size: int, num_layers: int, num_heads: int) -> Iterable[Layout]:
    """All that :func:`check_layout` lets pass, with up to 8 chunks."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for tensor in sizes:
        for pipeline in sizes:
            for chunks in (1, 2, 3, 4, 6, 8) if pipeline > 1 else (1,):
                layout = Layout(tensor=tensor, pipeline=pipeline, chunks=chunks)
                if _problem(layout, world_size, num_layers, num_heads) is None:
                    yield layout


def nearest_layout(asked: Layout, world_size: int, num_layers: int, num_heads: int) -> Layout:
    """The possible layout whose sizes differ least, by their ratios."""

    def distance(layout: Layout) -> float:
        pairs = (
            (layout.tensor, asked.tensor),
            (layout.pipeline, asked.pipeline),
            (layout.chunks, asked.chunks),
        )
        return sum(max(a / b, b / a) - 1 for a, b in pairs)

    return min(possible_layouts(world_size, num_layers, num_heads), key=distance)


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of ``of`` (not 0) that is nearest to ``number``.

    >>> nearest_multiple(30, 8)
    32
    """
    return max(1, round(number / of)) * of
