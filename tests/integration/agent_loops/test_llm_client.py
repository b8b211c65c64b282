"""The client of verl's own agent loops: every kind of call runs in the data plane, with all that it asks for."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
import ray
from support.client_calls import KINDS, generate
from support.plane import plane

from seamless_verl.agent_loops.llm_client import SeamlessClient
from seamless_verl.replica.server import SeamlessServer

pytestmark = pytest.mark.integration


def test_each_kind_of_call_reaches_the_engine_through_the_data_plane(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, replicas=1, delay_s=0.0) as running:
        running.commit(1)
        assert generate(running.config, 2) == [1000] * 2 * len(KINDS)
        assert ray.get(running.first.checked_metrics.remote())["calls/length"] == 2 * len(KINDS)
        seen = {request.conversation: request for request in ray.get(running.servers[0].seen.remote())}
        for kind, (sampling, beside) in KINDS.items():
            request = seen[f"{kind} 1"]
            assert sampling.items() <= request.sampling.items()
            media = pickle.loads(request.media) if request.media else {}
            assert media.get("multi_modal_data", {}).get("image") == beside.get("image_data")
            assert media.get("mm_processor_kwargs") == beside.get("mm_processor_kwargs")
        with pytest.raises(TypeError, match="takes no heat"):
            asyncio.run(SeamlessClient(running.config).generate("h", prompt_ids=[1], sampling_params={}, heat=1))


def test_a_call_past_the_data_plane_is_refused() -> None:
    with pytest.raises(RuntimeError, match="past the data plane"):
        asyncio.run(SeamlessServer.generate(None))  # type: ignore[arg-type]
