"""The responses of one session that are stored: what the Responses API can continue, return and delete.

An agent may name an item of a stored conversation in the place of sending it. Items of output have ids that follow from
their response's id, so that they are the same after a restart.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seamless_verl.gateway.api_errors import ApiError, ErrorCode

REFERENCE = "item_reference"  # The type of an input item that names another one
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""What ids of items begin with, by the items' types."""


class ItemIds:
    """The ids of one response's output items: each has the response's, and its place among those of its type."""

    def __init__(self, response_id: str) -> None:
        self._response, self._places = response_id.removeprefix("resp_"), Counter[str]()
        self._ids: dict[str, str] = {}

    def assign(self, item: Any) -> None:
        """Gives an item its id; the items of one id, as in the events of a stream, keep one."""
        earlier = item.id
        if earlier in self._ids.values():
            return
        if (found := self._ids.get(earlier)) is None:
            prefix = ITEM_PREFIXES.get(item.type, item.type)
            found = f"{prefix}_{self._response}_{self._places[item.type]}"
            self._places[item.type] += 1
            if earlier:
                self._ids[earlier] = found
        item.id = found

    def assigned(self, earlier: str) -> str:
        """The id of the item that had this one before."""
        return self._ids.get(earlier, earlier)


@dataclass(frozen=True)
class StoredResponse:
    """A response as JSON, and the input items that continue its conversation."""

    body: dict[str, Any]
    items: Sequence[Any]


class StoredResponses:
    """The latest responses of a session by id, as many as each `put` allows; the oldest goes first."""

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

    def previous(self, body: Mapping[str, Any]) -> StoredResponse | None:
        """The response that a request continues, if any; raises ApiError when none of its id is stored."""
        name = body.get("previous_response_id")
        if not isinstance(name, str):
            return None  # a value of another type is for vLLM to refuse
        if (previous := self._responses.get(name)) is None:
            message = f"Previous response with id '{name}' not found."
            raise ApiError(ErrorCode.NO_PREVIOUS, message, param="previous_response_id")
        return previous

    def referenced(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The items that a request's input names, by id; raises ApiError when none of an id is stored."""
        items = body.get("input")
        names = [name for item in items if (name := referenced_id(item))] if isinstance(items, list) else []
        found = self._find_items(set(names))
        if (unknown := next((name for name in names if name not in found), None)) is not None:
            raise ApiError(ErrorCode.NO_ITEM, f"Item with id '{unknown}' not found.", param="input")
        return found

    def _find_items(self, missing: set[str]) -> dict[str, Any]:
        """Those of the items that are in stored conversations; the latest conversation has most of them."""
        found = dict[str, Any]()
        for response in reversed(self._responses.values()):
            if not missing:
                break
            for item in response.items:
                name = item.get("id") if isinstance(item, Mapping) else getattr(item, "id", None)
                if name in missing:
                    missing.remove(name)
                    found[name] = item
        return found

    def handle(self, method: str, response_id: str) -> dict[str, Any]:
        """What GET or DELETE of a response returns; raises ApiError when none of this id is stored."""
        if (stored := self._responses.get(response_id)) is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"Response with id '{response_id}' not found.", param="response_id")
        if method == "GET":
            return stored.body
        del self._responses[response_id]
        return {"id": response_id, "object": "response", "deleted": True}


def referenced_id(item: object) -> str | None:
    """The id of the item that an input item names, if it is such a reference."""
    name = item.get("id") if isinstance(item, Mapping) and item.get("type") == REFERENCE else None
    return name if isinstance(name, str) else None
