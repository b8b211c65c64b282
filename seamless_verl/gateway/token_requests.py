"""Requests of token ids, which get token ids: what the gateway asks of their bodies, and changes in them.

vLLM serves them at `/inference/v1/generate`. Trainers that render conversations themselves call it, as the training
client of verifiers does. Their parameters stand in `sampling_params`, under the names of vLLM's SamplingParams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.request_rules import check_schemas

TOKENS_PATH = "/inference/v1/generate"
PARAMETERS, TOKEN_IDS = "sampling_params", "token_ids"
IN_IMAGES = "images reach the model by the other APIs, in which they are recorded"
UNSERVED = {"features": IN_IMAGES, "content_parts": IN_IMAGES}
FINAL_ONLY = 2  # of vLLM's RequestOutputKind: one output, with all of its tokens


def parameters_of(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a request has its parameters: in its body, or in a part of it. What is no object vLLM refuses."""
    if path != TOKENS_PATH:
        return body
    given = body.get(PARAMETERS)
    return given if isinstance(given, Mapping) else {}


def adapt_tokens(
    body: Mapping[str, Any], max_nesting: int, context: int, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """The body that vLLM gets, for a model with room for `context` tokens; `sampling` is the session's.

    A reply has the room that its prompt leaves, and is decoded, for it is recorded with its text. With one likeliest
    token it is the same as with none, which can be repeated from the record. Raises ApiError for images, for a stream
    of several choices, and as `check_schemas` does.
    """
    for name, why in UNSERVED.items():
        if body.get(name) is not None:
            raise ApiError(ErrorCode.UNSUPPORTED, f"{name} is not served here: {why}. Leave it out", param=name)
    if not isinstance(given := body.get(PARAMETERS, {}), dict):
        return dict(body)
    check_schemas(given, max_nesting)
    if body.get("stream") and given.get("n") not in (None, 1):  # vLLM counts the tokens of the first choice alone
        raise ApiError(ErrorCode.UNSUPPORTED, "A stream of token ids has one choice. Leave n out", param="n")
    asked_for = {name: value for name, value in given.items() if value is not None}
    changed = {**asked_for, **sampling, "detokenize": True, "output_kind": FINAL_ONLY}  # vLLM sets that of a stream
    if changed.get("logprobs") == 1:
        changed["logprobs"] = 0
    ids, asked = body.get(TOKEN_IDS), given.get("max_tokens")
    room = max(1, context - len(ids)) if isinstance(ids, list) else context
    if asked is None or (isinstance(asked, int) and asked > room):
        changed["max_tokens"] = room
    return {**body, PARAMETERS: changed}
