"""Requests of token ids: they are recorded and sampled as all others, and get token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway import EOS, GatewayHarness, gateway_harness

from seamless_verl.gateway.token_requests import TOKENS_PATH
from seamless_verl.trajectory.turns import observation_of

pytestmark = pytest.mark.integration


async def ask(harness: GatewayHarness, ids: list[int], session: dict[str, str] | None = None, **more: Any) -> Any:
    url = (session or harness.session)["anthropic_base_url"] + TOKENS_PATH  # without `/v1`
    parameters = more.pop("sampling_params", {"logprobs": 1})
    body = {"model": "nano", "token_ids": ids, "sampling_params": parameters, **more}
    return await harness.http.post(url, json=body)


def choice_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return dict(choice)


async def test_a_request_gets_ids_with_their_logprobs(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("yes")
        choice = choice_of(await ask(harness, [72, 73]))
        ids = [*harness.ids("yes"), EOS]
        assert (choice["token_ids"], choice["finish_reason"]) == (ids, "stop")
        names = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
        assert names == [(f"token_id:{token}", -0.25) for token in ids]
        (call,) = harness.source.calls
        assert list(call.prompt_ids) == [72, 73] and call.request["path"] == TOKENS_PATH
        assert call.sampling["logprobs"] == 0, "a reply that can be repeated from the record"
        await harness.drain()
        assert harness.recorder.ids(call.call_id) == ids and harness.recorder.ends()[0][2] == {"text": "yes"}
        choice_of(await ask(harness, [72, 74]))
        assert observation_of(harness.source.calls[1].request) != observation_of(call.request), "what it read"


async def test_what_the_session_sets_holds(nano: Path) -> None:
    """As in the other APIs: overrides always, defaults where a request has none, and its budget of tokens."""
    async with gateway_harness(nano) as harness:
        sampling = {"defaults": {"min_p": 0.1, "presence_penalty": 0.5}, "overrides": {"temperature": 0.7}}
        session = await harness.open(sampling=sampling, limits={"max_tokens": 5})
        given = {"temperature": 0.2, "min_p": 0.3, "max_tokens": 9}
        choice_of(await ask(harness, [72], session, sampling_params=given))
        sampled = harness.source.calls[0].sampling
        expected = {"temperature": 0.7, "min_p": 0.3, "presence_penalty": 0.5, "max_tokens": 5}
        assert {name: sampled[name] for name in expected} == expected


async def test_a_reply_has_the_room_that_its_prompt_leaves(nano: Path) -> None:
    """Also where a request says nothing, for which vLLM's own parameters would have 16 tokens."""
    async with gateway_harness(nano) as harness:
        context = harness.gateway.client.model_config.max_model_len
        for parameters in ({}, {"max_tokens": context}, {"max_tokens": None, "n": None}):
            choice_of(await ask(harness, [72, 73, 74], sampling_params=parameters))
            assert harness.source.calls[-1].sampling["max_tokens"] == context - 3
        refused = await ask(harness, [72] * context)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_several_choices_and_the_id_of_their_reply(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        reply = await ask(harness, [72], sampling_params={"n": 2})
        assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]
        calls = harness.source.calls
        assert len(calls) == 2 and {f"generate-tokens-{call.reply_name}" for call in calls} == {
            reply.json()["request_id"]
        }


async def test_a_stream_gives_the_same_ids(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("yes")
        reply = await ask(harness, [72, 73], stream=True)
        assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
        assert harness.recorder.ids(harness.source.calls[0].call_id) == [*harness.ids("yes"), EOS]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "features"),
        ({"content_parts": [{"type": "image_url", "url": "data:,"}]}, "content_parts"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"sampling_params": {"n": 1000}}, "choices"),
        ({"sampling_params": {"n": 2}, "stream": True}, "one choice"),
        ({"sampling_params": {"trace_decode_token_ids": [5]}}, "trace_decode_token_ids"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1 << 30]}, "vocab"),
    ],
)
async def test_what_cannot_be_recorded_is_refused(nano: Path, more: dict[str, Any], named: str) -> None:
    async with gateway_harness(nano) as harness:
        reply = await ask(harness, more.pop("token_ids", [72]), **more)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
        assert not harness.source.calls


async def test_a_conversation_of_ids_is_one_sequence(nano: Path) -> None:
    """What a client renders itself continues the recorded tokens as far as its ids repeat them."""
    async with gateway_harness(nano) as harness:
        harness.set_replies("a", "b")
        first = choice_of(await ask(harness, [72, 73]))["token_ids"]
        choice_of(await ask(harness, [72, 73, *first, 74]))
        assert list(harness.source.calls[1].prompt_ids) == [72, 73, *first, 74]
