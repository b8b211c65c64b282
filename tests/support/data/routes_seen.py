"""Writes down which experts Megatron's routers choose, where the process has ROUTES_SEEN, a folder.

For each layer of a micro-batch whose routes are replayed a line of JSON: `ids` of its sequences, `layer` from 0 on, and
as `rows` of this rank [tag, experts], where the tags 1 and on count the micro-batch's tokens and 0 is padding. A run
imports it as `actor_rollout_ref.model.external_lib`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import seamless_verl.platform.engine  # noqa: F401 - which this takes the place of

SEEN = "ROUTES_SEEN"


def watch(folder: Path) -> None:
    import torch
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
    from verl.models.mcore.util import preprocess_thd_engine
    from verl.utils.megatron import router_replay_patch, router_replay_utils
    from verl.workers.engine.megatron import transformer_impl

    align, place = transformer_impl.align_r3_router_replay_data, transformer_impl.set_router_replay_data
    choose = router_replay_patch._patched_topk_routing_with_score_function
    now: dict[str, Any] = {}

    def aligned(routes: Any, input_ids: Any) -> Any:
        now["ids"] = [row.tolist() for row in input_ids.unbind()]
        return align(routes, input_ids)

    def placed(*args: Any, model: Any = None, **kwargs: Any) -> Any:
        if not now:  # R2, which has no engine's routes to be compared with
            return place(*args, model=model, **kwargs)
        sizes, begin, tags = [len(ids) for ids in now["ids"]], 1, []
        for size in sizes:
            tags.append(torch.arange(begin, begin + size))
            begin += size
        packed, _, _ = preprocess_thd_engine(torch.nested.as_nested_tensor(tags, layout=torch.jagged), pre_process=True)
        now["tags"] = scatter_to_sequence_parallel_region(packed.squeeze(0)).tolist()
        now["layers"] = {id(router): number - 1 for number, router in router_replay_utils.iter_model_routers(model)}
        return place(*args, model=model, **kwargs)

    def chosen(*args: Any, router_replay: Any = None, **kwargs: Any) -> Any:
        probs, routing_map = choose(*args, router_replay=router_replay, **kwargs)
        forward = router_replay_patch.RouterReplayAction.REPLAY_FORWARD
        if now and router_replay is not None and router_replay.router_replay_action == forward:
            experts = [row.nonzero().flatten().tolist() for row in routing_map]
            rows = list(zip(now["tags"], experts, strict=True))
            line = {"ids": now["ids"], "layer": now["layers"][id(router_replay)], "rows": rows}
            with (folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        return probs, routing_map

    transformer_impl.align_r3_router_replay_data, transformer_impl.set_router_replay_data = aligned, placed
    router_replay_patch._patched_topk_routing_with_score_function = chosen


def seen(folder: Path) -> list[tuple[list[int], int, dict[int, set[int]]]]:
    """Of each sequence, layer and rank: the ids, the layer, and the experts by position, as far as the rank has it."""
    found = []
    for file in folder.glob("*.jsonl"):
        for text in file.read_text().splitlines():
            line, begin = json.loads(text), 1
            for ids in line["ids"]:
                of_ids = range(begin, begin + len(ids))
                rows = {tag - begin: set(experts) for tag, experts in line["rows"] if tag in of_ids}
                found.append((ids, line["layer"], rows))
                begin += len(ids)
    return found


if SEEN in os.environ:
    watch(Path(os.environ[SEEN]))
