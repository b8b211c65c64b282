"""Says that a prompt is too long as each API says it, for clients that then compact the conversation or stop.

Texts and codes are those of the real services, since clients look for them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

STATUS = 400
CODE = "context_length_exceeded"
RESPONSES_MESSAGE = "Your input exceeds the context window of this model. Please adjust your input and try again."


@dataclass(frozen=True)
class Overflow:
    """A prompt of `tokens` that leaves no room for a reply in a context of `limit` tokens; `asked` of them at most."""

    tokens: int
    limit: int
    asked: int

    @property
    def message(self) -> str:
        """As OpenAI says it for chat completions."""
        return (
            f"This model's maximum context length is {self.limit} tokens. However, you requested "
            f"{self.tokens + self.asked} tokens ({self.tokens} in the messages, {self.asked} in the completion). "
            "Please reduce the length of the messages or completion."
        )

    @property
    def anthropic_message(self) -> str:
        """As Anthropic says it: of the prompt alone, or of a prompt that just fits, with the reply."""
        if self.tokens > self.limit:
            return f"prompt is too long: {self.tokens} tokens > {self.limit} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {self.tokens} + {self.asked} > {self.limit}, "
            "decrease input length or `max_tokens` and try again"
        )


def openai_overflow(overflow: Overflow, path: str) -> dict[str, Any]:
    """The JSON body of the error in OpenAI's APIs."""
    responses = path == "/v1/responses"
    message = RESPONSES_MESSAGE if responses else overflow.message
    param = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(path, "messages")
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": CODE}}


def failed_response_events(response_id: str, model: str, created: int) -> bytes:
    """The events of a streamed response that fails for its length: such a stream begins, and fails."""
    response = {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": model,
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }
    failed = {**response, "status": "failed", "error": {"code": CODE, "message": RESPONSES_MESSAGE}}
    events = (
        {"type": "response.created", "sequence_number": 0, "response": response},
        {"type": "response.in_progress", "sequence_number": 1, "response": response},
        {"type": "response.failed", "sequence_number": 2, "response": failed},
    )
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
