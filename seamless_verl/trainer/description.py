"""What a run says of itself in its folder, from its config: `runtime/files.py` writes it."""

from __future__ import annotations

import time
from pathlib import Path

from omegaconf import DictConfig

from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.resources.tags import Layout
from seamless_verl.runtime.files import RunDescription


def describe(config: DictConfig, seamless: SeamlessConfig, layout: Layout) -> RunDescription:
    """The description of the run that begins now; its journals are those of the gateway's shards."""
    gateway, folder, model = seamless.gateway, config.trainer.default_local_dir, config.actor_rollout_ref.model
    journals = [gateway.journal_of(shard, folder) for shard in range(gateway.shards)] if gateway.enabled else []
    tokenizer = str(model.get("tokenizer_path") or model.path)
    return RunDescription(
        name=f"{config.trainer.project_name}/{config.trainer.experiment_name}",
        began=time.time(),
        layout=str(layout.value),
        model=str(Path(tokenizer).absolute()) if Path(tokenizer).is_dir() else tokenizer,
        journals=tuple(str(path.absolute()) for path in journals),
        max_staleness=seamless.staleness_bound,
        samples=config.actor_rollout_ref.rollout.n,
        updates=config.trainer.v1.seamless.parameter_sync_step,
    )
