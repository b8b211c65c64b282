"""What of a request's body becomes a placeholder, in each API's form."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from seamless_verl.gateway.api_errors import ApiError
from seamless_verl.gateway.request_rules import RequestRules, adapt, media_in, media_kind

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
LEFT_OUT = "[image left out: this model is given text only]"


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "u"}}, "image"),
        ({"type": "input_image", "image_url": "u"}, "image"),
        ({"image_url": "u"}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "video_url", "video_url": {}}, "video"),
        ({"type": "input_file", "file_id": "f"}, "file"),
        ({"type": "document", "source": {}}, "document"),
        *[({"type": name, "text": "an image"}, None) for name in ("text", "input_text", "output_text", "refusal")],
        *[(part, None) for part in ("image", None, {}, {"text": "an image"}, {"type": 3}, {"type": "profile"})],
    ],
)
def test_which_parts_are_no_text(part: Any, kind: str | None) -> None:
    assert media_kind(part) == kind


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [user({"type": "text", "text": "?"}, {"type": "image_url"})]},
         {"messages": [user({"type": "text", "text": "?"}, {"type": "text", "text": LEFT_OUT})]}),
        ({"messages": [{"role": "tool", "content": [IMAGE]}]},
         {"messages": [{"role": "tool", "content": [{"type": "text", "text": LEFT_OUT}]}]}),
        ({"messages": [user({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]})]},
         {"messages": [user({"type": "tool_result", "tool_use_id": "t",
                             "content": [{"type": "text", "text": LEFT_OUT}]})]}),
        ({"messages": [user({"type": "document", "source": {"type": "text", "data": "a letter"}})]},
         {"messages": [user({"type": "text", "text": "a letter"})]}),
        ({"input": [user({"type": "input_image", "image_url": "u"})]},
         {"input": [{**user({"type": "input_text", "text": LEFT_OUT}), "type": "message"}]}),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
         {"input": [{"type": "function_call_output", "call_id": "c",
                     "output": [{"type": "input_text", "text": LEFT_OUT}]}]}),
    ],
)  # fmt: skip
def test_a_placeholder_stays_in_its_place(body: dict[str, Any], expected: dict[str, Any]) -> None:
    sent = deepcopy(body)
    adapted = adapt(body, RequestRules(), 100)
    assert len(adapted.replaced_media) == 1 and adapted.body == expected
    assert body == sent, "the digest and the record of a retry are of what the agent sent"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "an image"}, {"input": "an image"}, {"messages": "image"}, {"messages": [None, 3, "image"]},
        {"messages": [{"role": "user", "content": "image"}, {"role": "user", "content": None}, {"role": "user"}]},
        {"messages": [user("image", None, {"type": "text", "text": "image"})]},
        {"input": [{"type": "function_call", "arguments": "{}", "name": "image", "call_id": "image"}]},
    ],
)  # fmt: skip
def test_what_has_no_media_is_left_alone(body: dict[str, Any]) -> None:
    assert media_in(body) == []
    assert adapt(body, RequestRules(media="refuse"), 100).body == body


def test_a_setting_refuses_by_name() -> None:
    with pytest.raises(ApiError, match="image, document"):
        adapt({"messages": [user(IMAGE, {"type": "document"}, IMAGE)]}, RequestRules(media="refuse"), 100)
