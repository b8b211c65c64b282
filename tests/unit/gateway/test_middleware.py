"""What the middleware records of requests that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import ask, middleware_before

from seamless_verl.gateway import middleware
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.http import parse_body
from seamless_verl.gateway.sessions import SessionTable


class Outside:
    """Refuses every request of a runner, and keeps what it is told of refusals."""

    def __init__(self) -> None:
        self.subjects: list[str] = []

    async def handle(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise ApiError(ErrorCode.MALFORMED, "no")

    async def refused(self, subject: str, error: ApiError) -> None:
        self.subjects.append(subject)


class Served:
    """The middleware, without an application behind it."""

    def __init__(self, **options: Any) -> None:
        self.table, self.outside, self.refused = SessionTable(), Outside(), list[tuple[Any, ...]]()
        self.middleware = middleware_before(
            None,
            self.table,
            settings=options,
            on_refusal=lambda *refusal: self.refused.append(refusal),
            serve_runner=self.outside.handle,
            on_outside_refusal=self.outside.refused,
        )

    async def post(self, path: str, key: str = "", body: bytes = b"{}") -> int:
        return int((await ask(self.middleware, path, body, key=key))[0])


async def test_an_agent_that_repeats_a_mistake_fills_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MAX_REFUSED", 3)
    monkeypatch.setattr(middleware, "MAX_REFUSED_OUTSIDE", 4)
    served = Served()
    (one, key), (other, other_key) = served.table.open("u"), served.table.open("u")
    for _ in range(5):
        assert await served.post(f"/s/{key}/v1/session/reward") == 400
        assert await served.post("/v1/session/reward", other_key) == 400
        assert await served.post(f"/s/{key}/v1/session/reward", other_key) == 403
        assert await served.post("/admin/nothing", "the admin's") == 404
        assert await served.post("/admin/nothing", "a guess") == 401
    assert served.outside.subjects.count(one.session_id) == 3
    assert served.outside.subjects.count(other.session_id) == 3, "its key was in the header"
    assert served.outside.subjects.count("/admin/nothing") == 4
    assert len(served.outside.subjects) == 10


async def test_a_body_that_is_too_large_is_refused_with_the_bound() -> None:
    served = Served(max_body=10)
    _, key = served.table.open("u")
    assert await served.post(f"/s/{key}/v1/messages", body=b" " * 11) == 413
    message = served.refused[-1][-1]
    assert "10 bytes" in message


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1' + b"0" * 400 + b".0}", "too large"),
        (b'{"a": NaN}', "no JSON number"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": ' + b"[" * 201 + b"]" * 201 + b"}", "200 deep"),
        (b'{"a": ' + b'{"a": ' * 5000 + b"1" + b"}" * 5001, "nested"),
    ],
)
def test_what_is_no_value_of_json_is_refused_where_it_is_read(body: bytes, named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        parse_body(body)
    assert caught.value.status == 400 and len(str(caught.value)) < 1000


def test_what_is_a_value_of_json_is_read() -> None:
    deep = b"[" * 199 + b"]" * 199
    body = parse_body(b'{"a": 1e300, "b": 1' + b"0" * 400 + b', "c": "\\ud83d\\ude42", "d": ' + deep + b"}")
    assert body["a"] == 1e300 and body["b"] == 10**400 and body["c"] == "\U0001f642"
