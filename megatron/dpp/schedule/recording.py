"""Recordings of scheduling decisions: writing, reading and replaying them.

A recording is a file of JSON lines per pipeline rank: a header with the format, its version and the
pipeline's shape, then one line per iteration with its actions as text. A :class:`DecisionRecorder`
writes it, :class:`Recording` reads it, and :class:`Replay` is the policy that follows one iteration
of it.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.dpp.config import Backward
from megatron.dpp.errors import (
    ConfigError,
    DataError,
    ReplayError,
    ScheduleError,
    Text,
    setting,
    shown,
)
from megatron.dpp.files import strict_json
from megatron.dpp.files.safe_files import open_text_to_write, open_to_read
from megatron.dpp.schedule.actions import Action, Geometry
from megatron.dpp.schedule.scheduler import allowed, refusal
from megatron.dpp.schedule.state import View

_FORMAT, _VERSION = "dpp-schedule", 1


def recording_path(path: str, rank: int) -> Path:
    """The file of one pipeline rank: ``path`` with ``.rankN`` added."""
    return Path(f"{path}.rank{rank}")


def replica_path(path: str, replica: int) -> str:
    """The recording of a data-parallel replica: ``path`` for the first, with ``.replicaN`` added
    for the others.
    """
    return f"{path}.replica{replica}" if replica else path


class DecisionRecorder:
    """Writes the decisions of one rank.

    Args:
        path: as given to ``record``; ``.rankN`` is added. An older file is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str, geometry: Geometry) -> None:
        header = {"format": _FORMAT, "version": _VERSION} | _shape(geometry)
        self._iteration = 0
        file = recording_path(path, geometry.rank)
        try:
            self._file = open_text_to_write(file)
        except OSError as error:
            record = setting("record", file)
            raise ConfigError(f"{record}: {error.strerror}", record) from error
        self._write(header)

    def write(
        self,
        geometry: Geometry,
        actions: Iterable[Action],
        backward: Backward,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Add one iteration (or evaluation) that ran ``actions``, in this order.

        Args:
            backward: how its backwards ran.
            sizes: of the microbatches; None if all have the largest size.
        """
        line: dict[str, Any] = {"iteration": self._iteration} | _owed(geometry, backward)
        if sizes is not None:
            line["sizes"] = list(sizes)
        self._write(line | {"actions": " ".join(map(str, actions))})
        self._iteration += 1

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclass(frozen=True)
class Recording:
    """The decisions of one rank, read back.

    Args:
        path: of the file, for messages.
        header: its first line.
        iterations: its other lines.
    """

    path: Path
    header: dict[str, Any]
    iterations: tuple[dict[str, Any], ...]

    @classmethod
    def load(cls, path: str, rank: int) -> Recording:
        """Read the file of ``rank`` that a :class:`DecisionRecorder` of the same ``path`` wrote.

        Raises:
            DataError: it is missing or not a recording; names the line.
        """
        file = recording_path(path, rank)
        header, *iterations = _read(file)
        return cls(file, header, tuple(iterations))

    def backward(self, index: int) -> Backward:
        """The way of an iteration's backwards; the usual one if there is no such iteration."""
        line = self.iterations[index] if index < len(self.iterations) else {}
        pieces, stock = line.get("w_pieces"), line.get("stock", math.inf)
        known = isinstance(stock, int | float) and not isinstance(stock, bool)
        return Backward(not isinstance(pieces, list) or any(pieces), stock if known else math.inf)

    def replay(self, index: int, geometry: Geometry, backward: Backward) -> Replay:
        """The policy that follows iteration ``index`` (0 for the first).

        Raises:
            ReplayError: the iteration does not exist, or has another shape.
            DataError: its line is broken.
        """
        replay = setting("replay", self.path)
        place = Text(f"{replay}, iteration {index}", replay)
        if index >= len(self.iterations):
            raise ReplayError(
                f"{replay} holds {len(self.iterations)} iterations; iteration {index} cannot be "
                "replayed",
                replay,
            )
        line = self.iterations[index]
        now = _shape(geometry) | {"stock": None, "groups": None} | _owed(geometry, backward)
        if changes := _changes(self.header | line, now):
            raise ReplayError(f"{place}: recorded with other settings: {changes}", place)
        text = line.get("actions")
        if not isinstance(text, str):
            raise DataError(f'{place}: it has no "actions"', place)
        try:
            actions = [Action.parse(word) for word in text.split()]
        except ScheduleError as error:
            raise DataError(f"{place}: {error}", place) from error
        sizes = line.get("sizes")
        if sizes is not None and not (
            isinstance(sizes, list) and len(sizes) == geometry.num_microbatches
        ):
            wrong = f'{place}: "sizes" {shown(sizes)} are not those of its microbatches'
            raise DataError(wrong, place)
        return Replay(actions, place, sizes or "largest")


class Replay:
    """The policy that follows a list of actions through one iteration.

    Args:
        name: origin of the actions, for messages.
        sizes: recorded sizes of the microbatches, ``largest`` if all had the largest, or None for
            any.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        name: str = "replay",
        sizes: Sequence[int] | Literal["largest"] | None = None,
    ) -> None:
        self._actions = list(actions)
        self._name, self._sizes = name, sizes
        self._num_checked = 0
        self._position = 0

    def __call__(self, view: View) -> Action | None:
        """The next recorded action when it may run, None while its input is on the way.

        Raises:
            ReplayError: it can never run here, the list ends too early, or a microbatch has another
                size than was recorded.
        """
        self._check_sizes(view)
        if self._position == len(self._actions):
            left = view.next_in_reference() or view.weight()
            if left is None:
                return None
            raise ReplayError(f"{self._name}: ends after {self._position} actions; {left} is left")
        action = self._actions[self._position]
        if allowed(view, action) == action:
            self._position += 1
            return action
        why = refusal(view, action)
        if why.may_pass:
            return None
        raise ReplayError(
            f"{self._name}: action {self._position + 1} of {len(self._actions)}, {action}, may not "
            f"run on pipeline rank {view.geometry.rank}: {why.text}"
        )

    def _check_sizes(self, view: View) -> None:
        """Compare the sizes learnt since the last call; a first forward teaches one."""
        if self._sizes is None:
            return
        while self._num_checked < view.forwards_run[0]:
            i = self._num_checked
            was = view.sizes.largest if self._sizes == "largest" else self._sizes[i]
            if view.sizes[i] != was:
                raise ReplayError(
                    f"{self._name}: microbatch {i} had size {was} and has size {view.sizes[i]}: "
                    "replay with the data of the recording"
                )
            self._num_checked += 1


def _shape(geometry: Geometry) -> dict[str, Any]:
    names = ("num_ranks", "rank", "num_chunks")
    return {name: getattr(geometry, name) for name in names}


def _owed(geometry: Geometry, backward: Backward) -> dict[str, Any]:
    """The fields that may differ between the iterations of a run; some lines lack some."""
    split = backward.split and not geometry.forward_only
    pieces = [geometry.pieces(c) if split else 0 for c in range(geometry.num_chunks)]
    found: dict[str, Any] = {"num_microbatches": geometry.num_microbatches}
    found |= {"forward_only": geometry.forward_only, "w_pieces": pieces}
    found |= {"stock": backward.stock} if split and math.isfinite(backward.stock) else {}
    return found | ({"groups": list(geometry.groups)} if geometry.groups else {})


def _changes(was: dict[str, Any], now: dict[str, Any]) -> str:
    """The fields of ``now`` that differ from ``was``, as text; empty if none does."""
    pairs = [(name, was.get(name), value) for name, value in now.items()]
    return "; ".join(
        f"{name} was {shown(old)} and is {new}" for name, old, new in pairs if old != new
    )


def _read(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a recording, its header first."""
    number, replay = 0, setting("replay", file)

    def broken(why: object, place: str = "") -> DataError:
        return DataError(f"{replay}{place}: {why}", replay)

    try:
        with io.TextIOWrapper(open_to_read(file), encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    parsed = strict_json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise broken(f"not JSON: {error}", f", line {number}") from error
                if not isinstance(parsed, dict):
                    raise broken("expected a JSON object", f", line {number}")
                if number == 1 and parsed.get("format") != _FORMAT:
                    raise broken("not a recording: another format")
                if number == 1 and (version := parsed.get("version")) != _VERSION:
                    raise broken(f"format version {shown(version)}, this program reads {_VERSION}")
                yield parsed
    except OSError as error:
        raise broken(error.strerror) from error
    except UnicodeDecodeError as error:
        raise broken(f"not a recording: {error}") from error
    if not number:
        raise broken("not a recording: it is empty")
