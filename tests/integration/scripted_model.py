"""An OpenAI endpoint whose replies were written down, for agents that run as processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class ScriptedModel:
    """`replies` by the key the call comes with: the n-th call has the n-th, the last one for ever."""

    replies: Mapping[str, Sequence[str]]
    url: str = ""
    requests: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def answer(self, key: str, request: dict[str, Any]) -> dict[str, Any]:
        asked = self.requests.setdefault(key, [])
        asked.append(request)
        replies = self.replies[key]
        text = replies[min(len(asked), len(replies)) - 1]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": f"{key}-{len(asked)}", "object": "chat.completion", "created": 0, "model": request["model"]}
        return {**head, "choices": [choice], "usage": usage}


@contextmanager
def served(model: ScriptedModel) -> Iterator[ScriptedModel]:
    """The model on a port of its own, in `model.url`, without `/v1`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions", self.path
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            key = self.headers["authorization"].removeprefix("Bearer ")
            body = json.dumps(model.answer(key, request)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        model.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield model
        finally:
            server.shutdown()
            thread.join()
