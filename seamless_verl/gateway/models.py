"""The list of models, in OpenAI's and in Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from seamless_verl.gateway.api_errors import Api, ApiError, ErrorCode

OWNER = "vllm"


@dataclass(frozen=True)
class ModelList:
    """The names of the one model that is served; `strict` says that it has no others.

    `context_length` in tokens; `started_at` in seconds since the epoch.
    """

    names: Sequence[str]
    context_length: int
    started_at: float
    strict: bool = False

    def list(self, api: Api) -> dict[str, Any]:
        """All served names."""
        data = [self._entry(name, api) for name in self.names]
        if api is Api.ANTHROPIC:
            return {"data": data, "has_more": False, "first_id": self.names[0], "last_id": self.names[-1]}
        return {"object": "list", "data": data}

    def describe(self, name: str, api: Api) -> dict[str, Any]:
        """One name, whatever it is unless the list is strict; raises ApiError."""
        if self.strict and name not in self.names:
            raise ApiError(ErrorCode.NO_MODEL, f"The model `{name}` does not exist.", param="model")
        return self._entry(name, api)

    def _entry(self, name: str, api: Api) -> dict[str, Any]:
        if api is Api.ANTHROPIC:
            created = datetime.fromtimestamp(int(self.started_at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": created,
                "max_input_tokens": self.context_length,
                "max_tokens": self.context_length,
            }
        return {
            "id": name,
            "object": "model",
            "created": int(self.started_at),
            "owned_by": OWNER,
            "root": self.names[0],
            "parent": None,
            "max_model_len": self.context_length,
        }
