"""The responses of one session that are stored: what the Responses API can continue, return and delete.

Owned state: the latest responses by id, each with the items of its conversation up to its own output. They belong to
the session and end with it; the oldest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seamless_verl.gateway.api_errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from seamless_verl.gateway.session import Session


@dataclass(frozen=True)
class StoredResponse:
    """A response as JSON, and the input items that continue its conversation."""

    body: dict[str, Any]
    items: Sequence[Any]


class StoredResponses:
    """At most as many responses as each `put` allows."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, response_id: str) -> StoredResponse | None:
        return self._responses.get(response_id)

    def put(self, response_id: str, response: StoredResponse, limit: int) -> None:
        """Stores a response, and drops the oldest ones beyond the limit."""
        self._responses[response_id] = response
        while len(self._responses) > limit:
            self._responses.popitem(last=False)

    def delete(self, response_id: str) -> bool:
        """Whether there was such a response."""
        return self._responses.pop(response_id, None) is not None


def find_previous(session: Session, body: Mapping[str, Any]) -> StoredResponse | None:
    """The stored response that a request continues, if any; raises ApiError when the session has none of its id."""
    name = body.get("previous_response_id")
    if not isinstance(name, str):
        return None  # a value of another type is for vLLM to refuse
    if (previous := session.responses.get(name)) is None:
        message = f"Previous response with id '{name}' not found."
        raise ApiError(ErrorCode.NO_PREVIOUS, message, param="previous_response_id")
    return previous


def stored_response(session: Session, method: str, response_id: str) -> dict[str, Any]:
    """What GET or DELETE of a stored response returns; raises ApiError when the session has none of this id."""
    stored = session.responses.get(response_id)
    if stored is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"Response with id '{response_id}' not found.", param="response_id")
    if method == "GET":
        return stored.body
    session.responses.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}
