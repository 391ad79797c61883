"""``megatron-dpp monitor``: a live view of a run.

    megatron-dpp monitor runs/latest [--once | --web]

Shows state, iteration, loss, tokens/s and the time left; of a traced run also the times of a step
and each rank's work and idle time; with --web the report as a page. A link such as ``runs/latest``
is followed to the run that it means. Reads only files: it may start and stop at any time, run on
another machine, and outlive ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import guarded, new_parser
from megatron.dpp.errors import ConfigError, DataError, DppError, require
from megatron.dpp.hosts import is_loopback, with_port
from megatron.dpp.report.analysis.sentences import (
    HOW_TO_TRACE,
    time_sentences,
    training_sentences,
)
from megatron.dpp.report.analysis.stragglers import SLOW
from megatron.dpp.report.analysis.summary import Analysis
from megatron.dpp.report.analysis.times import RankTimes
from megatron.dpp.report.pictures.page import fill, page
from megatron.dpp.report.reader import TraceFile, open_run
from megatron.dpp.report.report_command import build_report, names_of, numbers_so_far, state_of
from megatron.dpp.report.run_files import Training, find_run, read_training

REST = 10.0
"""Seconds of rest for each second that building the page took."""
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; connect-src 'self'"
    ),
}


class LivePage:
    """The text of the page, at most ``interval`` seconds old, or older where building takes long.

    Args:
        options: of ``megatron-dpp report``.
        interval: seconds between two builds.
    """

    def __init__(self, options: argparse.Namespace, interval: float) -> None:
        self._options, self._interval = options, interval
        self._lock = threading.Lock()
        self._text = ""
        self._due = 0.0

    def text(self) -> str:
        """The page."""
        with self._lock:
            started = time.monotonic()
            if started >= self._due:
                self._text = self._built()
                took = time.monotonic() - started
                self._due = started + took + max(self._interval, REST * took)
            return self._text

    def _built(self) -> str:
        try:
            report = build_report(self._options, live=True)
        except (DppError, OSError) as error:
            text = f"<h1>Waiting for the run</h1><p>{escape(str(error))}</p>"
            return fill("waiting for the run", text, self._interval, "waiting")
        status = f"{report.training.state}, {time.strftime('%H:%M:%S')}"
        return page(report, live_s=self._interval, status=status)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of ``/``; everything else is refused."""

    server: _Server
    timeout = 20.0
    server_version, sys_version = "megatron-dpp", ""

    def do_GET(self) -> None:
        name = self.headers.get("Host", "localhost").rsplit(":", 1)[0].strip("[]")
        if self.server.local and not is_loopback(name):  # a foreign page that names this address
            self.send_error(403, "this page is for this machine alone")
        elif self.path.partition("?")[0] != "/":
            self.send_error(404, "the report is at /")
        else:
            body = self.server.live.text().encode()
            self.send_response(200)
            for header in (*_HEADERS.items(), ("Content-Length", str(len(body)))):
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class _Server(ThreadingHTTPServer):
    allow_reuse_address = True  # a port whose last connections are closing; not one in use
    daemon_threads = True

    def __init__(self, live: LivePage, host: str, port: int) -> None:
        self.live, self.local = live, is_loopback(host)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that leaves early is no error."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def open_server(live: LivePage, host: str, port: int) -> ThreadingHTTPServer:
    """A server that listens, for ``serve_forever``.

    Raises:
        ConfigError: the port or the address cannot be had.
    """
    try:
        return _Server(live, host, port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: {why}") from error


def serve(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM, which raise KeyboardInterrupt."""
    require(not options.once, "--once prints into the terminal: leave it out with --web")
    name = names_of(options)[0]
    find_run(name)
    server = open_server(LivePage(options, options.interval), options.host, options.port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server:
        where = with_port(options.host, server.server_port)
        print(f"live report of {name}: http://{where}/", flush=True)
        if not is_loopback(options.host):
            print("everybody who reaches this address can read the report", flush=True)
        print("Ctrl-C ends it", flush=True)
        server.serve_forever(poll_interval=0.2)
    return 0


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command."""
    text = "Show a run live: loss, tokens/s, time left, and of a traced run what every rank does."
    parser = new_parser(prog, text, "[RUN] [options]")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="home, traces or metrics (default: runs/latest)")
    add("--benchmark_dir", "--benchmark-dir", metavar="DIR", help="the same")
    add("--metrics-file", metavar="FILE", help="losses (default: metrics.jsonl in the run's home)")
    add("--once", action="store_true", help="print once and end; exit status 3 for a failed run")
    add("--interval", type=float, default=2.0, metavar="S", help="seconds between updates (2)")
    add = parser.add_argument_group("live page").add_argument
    add("--web", action="store_true", help="serve the report as a page, until Ctrl-C")
    add("--port", type=int, default=8765, metavar="N", help="of the page (8765); 0: any free one")
    add("--host", default="127.0.0.1", metavar="ADDRESS",
        help="of the page (127.0.0.1: this machine alone; 0.0.0.0: everybody)")  # fmt: skip
    add("--baseline", metavar="RUN", help="another run beside it on the page")
    parser.set_defaults(iteration=None, threshold=SLOW)
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp monitor") -> int:
    """Exit status, with ``--once`` or when the run has ended: 0, or 3 when it failed or a rank of
    this host died without ending its trace.
    """
    options = build_parser(prog).parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        return guarded(prog, lambda: _run(options))
    return 0


def _run(options: argparse.Namespace) -> int:
    require(options.interval > 0, f"--interval {options.interval:g}: must be above 0")
    return serve(options) if options.web else _watch(options)


def _watch(options: argparse.Namespace) -> int:
    name = names_of(options)[0]
    while True:
        began = time.monotonic()
        place = find_run(name)
        folder = place.traces()
        files: list[TraceFile] = []
        with contextlib.suppress(*([] if options.once else [DataError])):  # a header half written
            files = [] if folder is None else open_run(folder, allow_missing=True)
        training = read_training(place.home, options.metrics_file or place.metrics)
        state, dead = state_of(place, files, training)
        if not files and not training.metrics and state == "ended":
            place.need_traces()
        text = _view(folder or place.home, files, training, state)
        erase = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not options.once else ""
        print(erase + text, flush=True)
        if options.once or state.partition(" ")[0].strip(",:") not in ("starting", "running"):
            return 3 if dead or state.startswith("failed") else 0
        time.sleep(max(options.interval, REST * (time.monotonic() - began)))


def _view(place: Path, files: list[TraceFile], training: Training, state: str) -> str:
    """The whole text of one look."""
    found = numbers_so_far(files) if files else None
    lines = [f"{place}: {state}", *training_sentences(training)]
    lines += time_sentences(found.totals) if found else []
    return "\n".join([*lines, "", *(_ranks(files, found) if files else [HOW_TO_TRACE])])


def _ranks(files: list[TraceFile], found: Analysis | None) -> list[str]:
    """A line per rank, in the order of stages."""
    lines = [" rank  stage  state    at work    idle  mostly        memory MiB  held"]
    rows = {row.rank: row for row in found.ranks} if found else {}
    for file in sorted(files, key=lambda file: (file.layout.pipeline, file.rank)):
        alive = {True: "runs", False: "DEAD", None: "remote"}[file.alive]
        alive = "ended" if file.complete else alive
        row = rows.get(file.rank)
        times = _times(row) if row else "no iteration that all ranks finished yet"
        lines.append(f"{file.rank:>5}  {file.layout.pipeline:>5}  {alive:<7}  {times}")
    return lines


def _times(row: RankTimes) -> str:
    worst = max(row.idle_ms, key=lambda cause: row.idle_ms[cause], default="")
    memory, held = row.peaks.get("memory", 0.0) / 2**20, row.peaks.get("held", 0.0)
    busy = row.busy_ms / (row.window_ms or 1.0)
    return f"{busy:>7.1%}  {row.bubble:>6.1%}  {worst:<12}  {memory:>10,.0f}  {held:>4.3g}"
