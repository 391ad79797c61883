"""The live page: one page from memory, while the files of a run grow."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp.report.monitor_command import LivePage, build_parser, open_server
from tests.report.synthetic import Run, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A function that fetches from a live page of ``tmp_path`` a second after the last time."""
    options = build_parser("monitor").parse_args(["--web", "--benchmark_dir", str(tmp_path)])
    live, now = LivePage(options, 0.01), [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr("megatron.dpp.report.monitor_command.time", clock)
    server = open_server(live, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def fetch(path="/", method="GET", **headers):
        now[0] += 1.0
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    yield fetch
    server.shutdown()
    thread.join(30)
    server.server_close()
    assert not thread.is_alive()


def badge(text: str) -> str:
    return re.search(r'<div id="live"[^>]*>(.*?)</div>', text)[1]


def test_the_page_waits_for_the_run_and_follows_it_to_its_end(page, tmp_path):
    status, text = page()
    assert (status, badge(text)) == (200, "waiting")
    assert "no trace" in text
    directory = write(Run(ranks=2, iterations=4), tmp_path / "traces")
    whole = {path: path.read_text() for path in directory.iterdir()}
    for path, content in whole.items():
        cut = content.index('"name":"iteration 2"')
        alive = re.sub(r'"process":\d+', f'"process":{os.getpid()}', content[:cut], count=1)
        path.write_text(alive)
    text = page()[1]
    assert ", 2 iterations</dd>" in text
    for path, content in whole.items():
        path.write_text(content)
    text = page()[1]
    assert badge(text).startswith("ended, ")
    assert ", 3 iterations</dd>" in text


def test_nothing_but_the_page_is_served(page, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    for path in ("/secret.txt", "/../secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/traces/"):
        assert page(path)[0] == 404, path
    assert page(Host="evil.example")[0] == 403
    assert page(Host="localhost:1")[0] == 200
    assert page(method="POST")[0] == 501


def test_ports_that_cannot_be_had_are_named(page, tmp_path):
    live = LivePage(build_parser("monitor").parse_args([]), 1.0)
    with pytest.raises(ConfigError, match=r"--port 70000: .*0-65535"):
        open_server(live, "127.0.0.1", 70_000)
    open_server(live, "::1", 0).server_close()
    taken = open_server(live, "127.0.0.1", 0)
    with (
        taken,
        pytest.raises(ConfigError, match="Address already in use"),
    ):
        open_server(live, "127.0.0.1", taken.server_port)
    with pytest.raises(ConfigError, match="--port 0: Cannot assign"):
        open_server(live, "192.0.2.1", 0)


def test_the_command_listens_on_this_machine_alone_and_stops(tmp_path):
    write(Run(ranks=2), tmp_path)
    words = ("monitor", "--web", "--port", "0", "--benchmark_dir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron.dpp", *words], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        address = process.stdout.readline().split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert process.stdout.readline() == "Ctrl-C ends it\n"
        process.terminate()
        _, errors = process.communicate(timeout=150)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
