"""The replicas of a job, launched so that nothing waits for them that need not.

verl starts the engines and then the load balancer, and only then anything that talks to it. Here the
balancer exists first, empty, and learns of the replicas when they serve.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager


class SeamlessServers(LLMServerManager):
    """verl's manager with its two halves apart: `open_balancer`, then `launch`."""

    def __init__(self, *args: Any, with_doors: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if with_doors:
            from seamless_verl.trainer.replica.server import SeamlessReplica  # of vLLM alone, so not for all

            self.rollout_replica_class = SeamlessReplica

    def open_balancer(self) -> SeamlessServers:
        """Start the balancer without replicas; clients can be made from here on."""
        self.server_addresses: list[str] = []
        self.server_handles: list[ray.actor.ActorHandle] = []
        auto_await(self._init_global_load_balancer)()
        return self

    def launch(self) -> SeamlessServers:
        """Start every replica and tell the balancer; returns when all of them serve."""
        auto_await(self._initialize_llm_servers)()
        servers = dict(zip(self.server_addresses, self.server_handles, strict=True))
        ray.get(self.global_load_balancer.add_servers.remote(servers))
        return self

    def client(self) -> Any:
        """A client that continues a generation cut by a weight update."""
        return self.get_client(client_cls=FullyAsyncLLMServerClient)
