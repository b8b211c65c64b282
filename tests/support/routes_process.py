"""One rank's Megatron engine of a mixture of experts, in fp32 and in bf16: logprobs, and the experts that were chosen.

Run as `python -c "from support.routes_process import main; main()" CASE.json 0`. `routes` of the case is a file with
the experts of another model, for each sequence and layer [tokens, top k]; the bf16 engine computes with them as well.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from mbridge.core.util import unwrap_model
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from support.megatron_process import begin_alone, build_engine

Routes = list[list[torch.Tensor]]


class Mixture:
    """Megatron's model of an engine, and its routers."""

    def __init__(self, case: dict[str, Any], dtype: str) -> None:
        RouterReplay.clear_global_router_replay_instances()
        transformer = {"moe_enable_routing_replay": True, **case.get("transformer", {})}
        engine = build_engine({**case, "dtype": dtype, "transformer": transformer})
        engine.initialize()
        self.model = unwrap_model(engine.module)[0].eval()
        self.routers = list(RouterReplay.global_router_replay_instances)

    @torch.no_grad()
    def logprobs(self, sequences: list[list[int]], routes: Routes | None = None) -> tuple[list[torch.Tensor], Routes]:
        """Of each sequence's tokens but the first, and the experts of all; with `routes`, by those experts."""
        rows, chosen = [], []
        for i, sequence in enumerate(sequences):
            for layer, router in enumerate(self.routers):
                router.set_router_replay_action(
                    RouterReplayAction.RECORD if routes is None else RouterReplayAction.REPLAY_FORWARD
                )
                if routes is not None:
                    router.set_target_indices(routes[i][layer])
            ids = torch.tensor([sequence])
            logits = self.model(ids, torch.arange(len(sequence))[None], None).float()
            rows.append(logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
            chosen.append([router.get_recorded_indices() for router in self.routers])
        return rows, chosen


def main() -> None:
    case = begin_alone(sys.argv[1])
    result: dict[str, Any] = {"float32": Mixture(case, "float32").logprobs(case["sequences"])}
    halves = Mixture(case, "bfloat16")
    result["bfloat16"] = halves.logprobs(case["sequences"])
    result["replayed"], _ = halves.logprobs(case["sequences"], torch.load(case["routes"]))
    torch.save(result, f"{case['out']}/rank0.pt")
    torch.distributed.destroy_process_group()
