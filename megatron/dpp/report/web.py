"""The live page of ``megatron-dpp monitor --web``: the report of a run while it trains.

Serves one page from memory, which a request builds anew from the run's files when it is old. No
request names a file, so none can reach one.
"""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import sys
import threading
import time
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron.dpp.errors import ConfigError, DppError, require
from megatron.dpp.hosts import is_loopback, with_port
from megatron.dpp.report.building import build_report, names_of, state_of
from megatron.dpp.report.pictures.page import fill, page
from megatron.dpp.report.reader import open_run
from megatron.dpp.report.run_files import METRICS, STATE, find_run, read_training

REST = 10.0
"""Seconds of rest for each second that building the page took."""
_SOCKET_S = 20.0
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
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
        self._seen: object = None
        self._due = 0.0

    def text(self) -> str:
        """The page."""
        with self._lock:
            started = time.monotonic()
            if started >= self._due:
                try:
                    self._build()
                except (DppError, OSError) as error:
                    self._seen = None
                    text = f"<h1>Waiting for the run</h1><p>{escape(str(error))}</p>"
                    self._text = fill("waiting for the run", text, self._interval, "waiting")
                took = time.monotonic() - started
                self._due = started + took + max(self._interval, REST * took)
            return self._text

    def _build(self) -> None:
        """Build the page if the run's files have changed."""
        place = find_run(names_of(self._options)[0])
        folder = place.traces()
        files = [] if folder is None else open_run(folder)
        state, _ = state_of(place, files, read_training(place.home, last_only=True))
        paths = [*(file.path for file in files), place.home / METRICS, place.home / STATE]
        stats = [path.stat() for path in paths if path.exists()]
        seen = place, state, [(stat.st_mtime_ns, stat.st_size) for stat in stats]
        if seen != self._seen:
            report, _ = build_report(self._options, live=True)
            status = f"{state}, {time.strftime('%H:%M:%S')}"
            self._text = page(report, live_s=self._interval, status=status)
            self._seen = seen


def _handler(live: LivePage, *, local: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET of ``/``; everything else is refused."""

        timeout = _SOCKET_S
        server_version, sys_version = "megatron-dpp", ""

        def do_GET(self) -> None:
            name = self.headers.get("Host", "localhost").rsplit(":", 1)[0].strip("[]")
            if local and not is_loopback(name):  # a foreign page that names this address
                self.send_error(403, "this page is for this machine alone")
            elif self.path.partition("?")[0] != "/":
                self.send_error(404, "the report is at /")
            else:
                body = live.text().encode()
                self.send_response(200)
                for header in (*_HEADERS.items(), ("Content-Length", str(len(body)))):
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged."""

    return Handler


class _Server(ThreadingHTTPServer):
    allow_reuse_address = True  # a port whose last connections are closing; not one in use
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that leaves early is no error."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


def open_server(live: LivePage, host: str, port: int) -> ThreadingHTTPServer:
    """A server that listens, for ``serve_forever``.

    Raises:
        ConfigError: the port or the address cannot be had.
    """
    require(0 <= port <= 65535, f"--port {port}: must be in 0 .. 65535 (0: any free one)")
    server = _Server6 if ":" in host else _Server
    try:
        return server((host, port), _handler(live, local=is_loopback(host)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: in use on {host}; choose another, or 0 for any free one"
            ) from error
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from error


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
