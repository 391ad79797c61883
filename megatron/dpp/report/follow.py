"""Reading trace files that are still being written, for a live view.

Every file is read from where the last look ended; only the last iterations are kept. Ranks are put
side by side by the start of their iteration, which needs no common clock and is true to within the
skew of that start.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import deque
from pathlib import Path

from megatron.dpp.errors import DataError
from megatron.dpp.files.safe_files import open_to_read
from megatron.dpp.report.analysis.model import Iteration, IterationBuilder, RankIteration
from megatron.dpp.report.reader import FILE_PATTERN, TraceFile, parse_event, read_header

_PIECE_BYTES = 1 << 22


class FollowedFile:
    """One rank's file, and its last iterations with times from their own start."""

    def __init__(self, path: Path, keep: int) -> None:
        self.header = read_header(path)
        self.iterations: deque[RankIteration] = deque(maxlen=keep)
        self.ended = False
        self._builder = IterationBuilder(self.header)
        self._offset = 0
        self._rest = b""

    @property
    def replaced(self) -> bool:
        """True once a new run has written another file under this name."""
        try:
            other = _began(read_header(self.header.path)) != _began(self.header)
            return other or self.header.size < self._offset
        except (DataError, OSError):
            return True

    def poll(self) -> None:
        """Read what has been added."""
        with open_to_read(self.header.path) as file:
            file.seek(self._offset)
            while added := file.read(_PIECE_BYTES):
                self._offset += len(added)
                *lines, self._rest = (self._rest + added).split(b"\n")
                for line in lines:
                    self._line(line)

    def _line(self, line: bytes) -> None:
        try:
            event = parse_event(line.decode(errors="replace"))
        except ValueError:
            return
        if event["ph"] == "M":
            self.ended = self.ended or event["name"] == "end"
            return
        whole = self._builder.feed(event)
        if whole is not None:
            self.iterations.append(_from_own_start(whole))


def alive(file: TraceFile) -> bool | None:
    """True while the process of a rank exists; None when it runs on another host."""
    if file.host != socket.gethostname():
        return None
    return Path(f"/proc/{file.process}").exists()


def _began(file: TraceFile) -> tuple[int, int, int]:
    return file.process, file.start_ns, file.start_unix_ns


def _from_own_start(whole: RankIteration) -> RankIteration:
    start = whole.start
    return dataclasses.replace(
        whole,
        start=0,
        end=whole.end - start,
        tasks=[t._replace(start=t.start - start, end=t.end - start) for t in whole.tasks],
        waits=[w._replace(start=w.start - start, end=w.end - start) for w in whole.waits],
        spans=[s._replace(start=s.start - start, end=s.end - start) for s in whole.spans],
        sends=[],
        arrivals=[],
    )


class FollowedRun:
    """All files of a run's directory, those that appear later too.

    Args:
        directory: of its trace files.
        keep: iterations to keep of every rank.
    """

    def __init__(self, directory: Path, keep: int = 10) -> None:
        self.directory = directory
        self.files: dict[Path, FollowedFile] = {}
        self._keep = keep

    def poll(self) -> None:
        """Read what is new; files of a new run take the place of the old ones."""
        for path in sorted(self.directory.glob(FILE_PATTERN)):
            known = self.files.get(path)
            if known is None or known.replaced:
                try:
                    self.files[path] = FollowedFile(path, self._keep)
                except DataError:
                    continue  # its header is being written
            self.files[path].poll()

    def iterations(self) -> list[Iteration]:
        """The last iterations that every rank with a file has finished, oldest first."""
        per_rank = [{i.number: i for i in file.iterations} for file in self.files.values()]
        common = set.intersection(*(set(own) for own in per_rank)) if per_rank else set()
        return [
            Iteration(number, {own[number].rank: own[number] for own in per_rank})
            for number in sorted(common)
        ]
