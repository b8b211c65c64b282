"""The view as a process, by HTTP: what it answers, and to whom."""

from __future__ import annotations

import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from support.journal import session_opened, write
from support.paths import ROOT
from support.view import CUT, JOURNAL, make_run, served

from seamless_verl.journal import CallStarted, SqliteJournal
from seamless_verl.trajectory.records import tokens

pytestmark = pytest.mark.integration
ASSETS = ROOT / "seamless_verl" / "tools" / "view" / "assets"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with served(run) as address:
        yield address


@pytest.fixture(scope="module")
def http(address: str) -> Iterator[httpx.Client]:
    """A client that keeps its connection; paths are below the page's address."""
    with httpx.Client(base_url=address, timeout=20) as client:
        yield client


def test_the_page_and_all_that_it_names_are_served(address: str, http: httpx.Client) -> None:
    assert urlsplit(address).hostname == "127.0.0.1"
    page = http.get(address)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert len(files) > 10
    for file in files:
        answer = http.get(urljoin(address, str(file.relative_to(ASSETS))))
        assert answer.status_code == 200 and answer.content == file.read_bytes(), file
    without_slash = http.get(address.rstrip("/"))
    assert without_slash.is_redirect and without_slash.headers["location"] == address


def test_nothing_is_taken_from_elsewhere(address: str, http: httpx.Client) -> None:
    """No address of another server is in the page, and the browser is told not to ask any."""
    for file in ASSETS.glob("*"):
        if file.is_file():
            assert "http://" not in file.read_text() and "https://" not in file.read_text(), file
    policy = http.get(address).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy


@pytest.mark.parametrize("path", ["", "api/run", "main.js", "../etc/passwd"])
@pytest.mark.parametrize("token", ["", "x/", "é/", "%00/"])
def test_a_wrong_token_is_refused(address: str, http: httpx.Client, token: str, path: str) -> None:
    parts = urlsplit(address)
    for method in ("GET", "POST"):
        answer = http.request(method, f"{parts.scheme}://{parts.netloc}/{token}{path}")
        assert answer.status_code == 403 and "no token, or another run's" in answer.text


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("OPTIONS * HTTP/1.1", "", 403),
        ("GET /wrong/ HTTP/1.1", "Upgrade: websocket\r\nConnection: Upgrade\r\n", 403),
        ("GET {path}api/run HTTP/1.1", "Upgrade: websocket\r\nConnection: Upgrade\r\n", 200),
    ],
)
def test_requests_of_other_kinds_are_answered_like_any(
    address: str, request_line: str, headers: str, status: int
) -> None:
    parts = urlsplit(address)
    host, line = f"{parts.hostname}:{parts.port}", request_line.format(path=parts.path)
    websocket = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" if headers else ""
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(f"{line}\r\nHost: {host}\r\n{headers}{websocket}\r\n".encode())
        assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_token_that_begins_right_is_refused(address: str, http: httpx.Client) -> None:
    assert http.get(f"{address[:-2]}/api/run").status_code == 403
    assert http.get(f"{address[:-1]}x/api/run").status_code == 403


def test_nothing_outside_of_the_assets_is_served(http: httpx.Client) -> None:
    for path in ("..%2f__init__.py", "../__init__.py", "%2e%2e/run.py", "nothing.js"):
        assert http.get(f"{path}").status_code in (404, 403)


def test_what_it_answers(http: httpx.Client) -> None:
    def ask(path: str) -> httpx.Response:
        return http.get(f"api/{path}")

    assert ask("run").json()["description"]["name"] == "recipe/seamless"
    assert ask("metrics").json()["values"]["critic/score/mean"] == [0.25, 0.5]
    lanes = ask("devices?columns=5").json()
    assert lanes["names"] == ["train-0"] and len(lanes["shares"][0]) == 5 * len(lanes["kinds"])
    listed = ask("sessions?kind=several_versions").json()
    assert [one["session_id"] for one in listed["rows"]] == ["plain1", CUT]
    assert ask("groups").json()["total"] == 3
    session = ask(f"sessions/{CUT}").json()["session"]
    assert session["nodes"][4]["replica"] == "replica-1"
    tokens = ask(f"sessions/{CUT}/nodes/4?revision={session['revision']}&start=1&count=2").json()
    assert tokens["texts"] == ["a", "s"]
    assert ask(f"sessions/{CUT}/nodes/4?revision=old").json() is None
    assert ask(f"sessions/{CUT}/turns/{CUT}.1").json()["turn_id"] == f"{CUT}.1"


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("sessions/nobody", 404, "no session nobody"),
        (f"sessions/{CUT}/nodes/99", 404, "node 99 of 7"),
        (f"sessions/{CUT}/turns/x", 404, "x"),
        ("sessions?sort=best", 400, "is unknown. Give one of newest"),
        ("sessions?size=9999", 400, "a page has 1 to 500 rows"),
        ("devices?columns=0", 400, "is not between 1 and"),
        ("devices?last=-4", 400, "is no whole number"),
    ],
)
def test_what_cannot_be_answered_has_a_reason(http: httpx.Client, path: str, status: int, said: str) -> None:
    answer = http.get(f"api/{path}")
    assert answer.status_code == status and said in answer.json()["error"]


def test_what_is_no_unicode_is_shown_escaped(tmp_path: Path) -> None:
    call = CallStarted("s", "s.1", "d", tokens([1]), {"messages": [{"role": "user", "content": "half \ud83d"}]})
    with SqliteJournal(tmp_path / JOURNAL) as journal:
        write(journal, session_opened("s"), call)
    with served(tmp_path) as address:
        request = httpx.get(f"{address}api/sessions/s/turns/s.1", timeout=30).json()["request"]
    assert request["messages"][0]["content"] == "half \ud83d"


def test_it_only_reads(http: httpx.Client, run: Path) -> None:
    before = sorted(
        (file.name, file.read_bytes()) for file in run.iterdir() if not file.name.endswith(("-shm", "-wal"))
    )
    for path in ("run", "sessions", f"sessions/{CUT}", "devices", "metrics"):
        assert http.get(f"api/{path}").status_code == 200
        assert http.post(f"api/{path}").status_code == 405
    after = sorted((file.name, file.read_bytes()) for file in run.iterdir() if not file.name.endswith(("-shm", "-wal")))
    assert before == after


def test_a_run_goes_on_while_its_journal_is_damaged_or_gone(tmp_path: Path) -> None:
    """The page says what is wrong, and is right again when the file is."""
    run = make_run(tmp_path)
    with served(run) as address:
        whole = (run / JOURNAL).read_bytes()
        (run / JOURNAL).write_bytes(b"no database")
        summary = httpx.get(f"{address}api/run", timeout=30)
        assert summary.status_code == 200 and summary.json()["step"] == 2
        (remark,) = summary.json()["remarks"]
        assert remark.startswith("Sessions cannot be shown. journal ") and "trajectories.sqlite" in remark
        for path in ("sessions", f"sessions/{CUT}"):
            answer = httpx.get(f"{address}api/{path}", timeout=30)
            assert answer.status_code == 503 and "trajectories.sqlite" in answer.json()["error"]
        assert httpx.get(f"{address}api/metrics", timeout=30).status_code == 200
        (run / JOURNAL).write_bytes(whole)
        assert httpx.get(f"{address}api/sessions", timeout=30).json()["total"] == 4
        with SqliteJournal(run / JOURNAL) as journal:
            write(journal, session_opened("more"))
            assert httpx.get(f"{address}api/sessions", timeout=30).json()["total"] == 5


def test_a_wheel_has_the_page(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    source = tmp_path / "source"  # setuptools builds in the folder of setup.py
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "seamless_verl"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([*command, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("seamless_verl/tools/view/assets/")}
    assert packed == {str(file.relative_to(ROOT)) for file in ASSETS.rglob("*") if file.is_file()}
