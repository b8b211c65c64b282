"""The page on failures has every subject that the doctor looks at."""

from __future__ import annotations

from support.doctor import ACCELERATED, facts
from support.paths import ROOT

from seamless_verl.tools.doctor.command import diagnose


def test_every_subject_is_in_the_table() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    unnamed = {"software": {"vllm": None}}
    subjects = {
        finding.subject for found in (facts(), facts(ACCELERATED), facts(unnamed)) for finding in diagnose(found)
    }
    assert {"vllm", "locked memory", "Ray"} <= subjects
    assert {subject for subject in subjects if f"`{subject}`" not in page} == set()
