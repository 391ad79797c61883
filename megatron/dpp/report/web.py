"""The live page of ``megatron-dpp monitor --web``: the report of a run while it trains.

Serves one page from memory, which a request builds anew from the run's files when it is old.
"""

from __future__ import annotations

import argparse
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
from megatron.dpp.report.building import build_report, names_of
from megatron.dpp.report.pictures.page import fill, page
from megatron.dpp.report.run_files import find_run

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
            report, _ = build_report(self._options, live=True)
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
