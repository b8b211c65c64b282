"""Agent loops made as verl makes them."""

from __future__ import annotations

from typing import Any

import hydra
from omegaconf import OmegaConf

from seamless_verl.tiny import make_tokenizer
from support.config import compose_ours


def make_loop(entry: dict[str, Any]) -> Any:
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap

    config = compose_ours("actor_rollout_ref.rollout.name=vllm")
    return hydra.utils.instantiate(
        config=OmegaConf.create(entry),
        trainer_config=DictConfigWrap(config=config),
        server_manager=None,
        tokenizer=make_tokenizer(),
        processor=None,
        hf_model_type="qwen3",
        dataset_cls=object,
        data_config=DictConfigWrap(config=config.data),
        tools=ToolListWrap([]),
    )
