"""The keys of training rows in TransferQueue: `{uid}_{session}_{row}`. A prompt's own row has its uid alone."""

from __future__ import annotations


def row_key(uid: str, session: int | str, row: int) -> str:
    """The key of a session's row, its sequences numbered from 0."""
    return f"{uid}_{session}_{row}"


def parts_of(key: str) -> tuple[str, str, str]:
    """The prompt's uid, the session's number and the row's, of a row's key."""
    uid, session, row = key.rsplit("_", 2)
    return uid, session, row


def prompt_of(key: str) -> str:
    """The prompt's uid, of the key of a row or of a prompt."""
    return key.rsplit("_", 2)[0]


def session_of(key: str) -> str:
    """The key of a row without the row's number: what the rows of a session have in common."""
    return key.rpartition("_")[0]
