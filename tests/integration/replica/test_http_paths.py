"""Of vLLM's own HTTP API a replica serves what a monitor asks for, and nothing that generates."""

from __future__ import annotations

import httpx
import pytest
from vllm.entrypoints.openai.api_server import build_app

from seamless_verl.platform.vllm_versions import serve_parser
from seamless_verl.replica.server import HTTP_PATHS, LOOPBACK, serve_only

pytestmark = pytest.mark.integration
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")


class Engine:
    """What vLLM's health check asks."""

    async def check_health(self) -> None: ...


async def test_a_monitor_is_answered_and_nobody_generates_past_the_gateway() -> None:
    arguments = serve_parser().parse_args(["--enable-lora"])
    app = build_app(arguments, supported_tasks=("generate",))
    assert {route.path for route in app.routes} > {*GENERATING, *HTTP_PATHS}, "the paths have other names now"
    app.state.engine_client, app.state.log_stats = Engine(), False
    port, serving = await serve_only(HTTP_PATHS, LOOPBACK, app, arguments, "127.0.0.2")
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", follow_redirects=True) as client:
            for path in GENERATING:
                assert (await client.post(path, json={"prompt": "1 + 1"})).status_code == 404, path
            assert (await client.get("/v1/models")).status_code == (await client.get("/docs")).status_code == 404
            for path in HTTP_PATHS:
                assert (await client.get(path)).status_code == 200, path
            with pytest.raises(httpx.ConnectError):  # the node's address, from which anybody could ask
                await client.get(f"http://127.0.0.2:{port}/health")
    finally:
        serving.cancel()


async def test_a_monitor_that_verl_sets_up_asks_at_the_nodes_address() -> None:
    arguments = serve_parser().parse_args([])
    app = build_app(arguments, supported_tasks=("generate",))
    app.state.engine_client, app.state.log_stats = Engine(), False
    port, serving = await serve_only(HTTP_PATHS, None, app, arguments, "127.0.0.2")
    try:
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.2:{port}/health")).status_code == 200
    finally:
        serving.cancel()
