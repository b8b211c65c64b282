"""The client of the view's bench: whom it asks, until when, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from seamless_verl.tools.bench import view
from seamless_verl.tools.bench.view import ASKS, Viewer


def folder_of(out: Path, *, steps: int) -> Path:
    folder = out / "viewed-seed1-r1"
    folder.mkdir()
    (folder / "log.txt").write_text("x\nThe view of this run: http://here:1/\n")
    (folder / "logged.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(steps)))
    return folder


def looked(out: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> Viewer:
    """After one look at a run of three steps."""
    viewer = Viewer(out, last_step=3)
    waits = iter([False, True])
    monkeypatch.setattr(viewer, "ended", SimpleNamespace(wait=lambda seconds: next(waits)))
    monkeypatch.setattr(view.httpx, "get", lambda url, timeout: httpx.Response(status))
    viewer.look()
    return viewer


def test_a_page_is_asked_for_all_that_the_overview_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, steps=2)
    viewer = looked(tmp_path, monkeypatch, 200)
    assert viewer.replies == {folder.name: len(ASKS)} and viewer.missing == []


def test_what_is_no_reply_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, steps=2)
    assert looked(tmp_path, monkeypatch, 500).missing[0] == "viewed-seed1-r1, api/run: 500"


def test_after_the_last_step_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, steps=3)
    viewer = looked(tmp_path, monkeypatch, 500)
    assert viewer.replies == {} and viewer.missing == []
