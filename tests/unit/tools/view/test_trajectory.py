"""A session's tree for the page: what was trained of each node, its tokens and texts, its drift."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import fill_journal
from support.journal import chunk_appended, open_journal, write
from support.view import CUT, JOURNAL, REPLY, make_run

from seamless_verl.journal import HandedOver, HandOverBegun, JournalReader
from seamless_verl.tools.trajectories.show import format_account
from seamless_verl.tools.view.trajectory import MAX_TOKENS, Texts, Trajectory
from seamless_verl.trajectory.policies import parse_policy
from seamless_verl.trajectory.sequences import assemble


@pytest.fixture
def cut(tmp_path: Path) -> Trajectory:
    """The session that a weight update cut, with its tokenizer."""
    run = make_run(tmp_path)
    stored = JournalReader(run / JOURNAL).read(CUT)
    assert stored is not None
    return Trajectory(stored, Texts.load(str(tmp_path / "model")))


def test_nodes_have_their_version_replica_and_what_was_trained(cut: Trajectory) -> None:
    view = cut.view()
    rows = [
        (node["parent"], node["version"], node["replica"], node["trained"], dict(node["dropped"]))
        for node in view["nodes"]
    ]
    assert rows == [
        (None, None, "", 0, {}),
        (0, 3, "replica-0", 0, {"stale": len(REPLY)}),
        (1, None, "", 0, {}),
        (2, 3, "replica-0", 0, {"stale": 11}),
        (3, 4, "replica-1", 8, {}),
        (3, None, "", 0, {}),
        (5, 4, "replica-0", len(REPLY), {}),
    ]
    assert [node["sequence"] for node in view["nodes"] if node["sequence"]] == [f"{CUT}.2", f"{CUT}.3"]
    assert view["nodes"][4]["start"] == view["nodes"][3]["start"] + 11 == view["nodes"][5]["start"]
    assert sum(node["trained"] for node in view["nodes"]) == view["trained"]
    assert view["generated"] == view["trained"] + sum(view["dropped"].values())
    account = assemble(cut.tree, parse_policy("mask_older_than:0"), 4).account
    assert (
        format_account(account)
        == f"account: {view['generated']} generated = {view['trained']} trained + 23 dropped (23 stale)"
    )


def test_turns_and_drift(cut: Trajectory) -> None:
    view = cut.view()
    assert [(one["turn_id"][-1], one["new"], one["generated"], one["end"]) for one in view["turns"]] == [
        ("1", 12, 12, 1),
        ("2", 5, 19, 4),
        ("3", 2, 12, 6),
    ]
    (drift,) = view["drifts"]
    assert (drift["turn_id"], drift["recorded_turn_id"], drift["lost_tokens"]) == (f"{CUT}.3", f"{CUT}.2", 8)
    assert (drift["recorded"], drift["replayed"][:2]) == (" as four", "!?") and "the agent" in drift["text"]
    assert view["policy"] == "mask_older_than:0" and view["version"] == 4 and view["outcome"] == "step 2"


def test_tokens_of_a_node(cut: Trajectory) -> None:
    tokens = cut.tokens(1, 0, 100)
    assert "".join(tokens["texts"]) == REPLY and tokens["total"] == len(tokens["ids"]) == len(
        tokens["logprobs"]
    ) == len(REPLY)
    assert tokens["mask"] == [0] * len(REPLY)
    context = cut.tokens(0, 0, 100)
    assert "".join(context["texts"]) == "What is 2+2?" and context["logprobs"] == context["mask"] == []
    part = cut.tokens(1, 4, 4)
    assert (part["start"], "".join(part["texts"]), part["total"]) == (4, "plus", len(REPLY))
    assert cut.tokens(1, 4, MAX_TOKENS + 1)["ids"] == tokens["ids"][4:] and cut.tokens(1, 99, 5)["ids"] == []
    assert cut.tokens(4, 0, 100)["mask"] == [1] * 8
    for number in (-1, 7):
        with pytest.raises(LookupError):
            cut.tokens(number, 0, 1)


def test_requests_and_replies(cut: Trajectory) -> None:
    assert cut.turn_texts(f"{CUT}.2")["request"]["messages"][0]["content"] == f"<b>question</b> of {CUT}.2"
    with pytest.raises(LookupError):
        cut.turn_texts("nothing")


def test_of_a_session_that_was_dropped_nothing_is_trained(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        fill_journal(journal)
        note = {"kept": False, "dropped": "timed_out"}
        write(journal, HandOverBegun("aaa1"), HandedOver("aaa1", 9.0, note))
        stored = journal.read("aaa1")
    assert stored is not None
    view = Trajectory(stored, Texts(missing="none")).view()
    assert (
        view["trained"] == 0
        and view["dropped"] == {"timed_out": 6}
        and {node["trained"] for node in view["nodes"]} == {0}
    )
    assert sum(sum(node["dropped"].values()) for node in view["nodes"]) == 6
    assert all(set(node["dropped"]) <= {"timed_out"} for node in view["nodes"])


def test_the_revision_changes_with_the_tree(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        fill_journal(journal)
        revisions = []
        for more in ([], [7]):
            if more:
                write(journal, chunk_appended(more, "aab2-c1", version=3))
            stored = journal.read("aab2")
            assert stored is not None
            revisions.append(Trajectory(stored, Texts()).revision)
    assert revisions[0] != revisions[1]
