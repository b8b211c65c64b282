"""What is made of a batch before it is trained: the old logprobs of rows that lack them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl.agent_loops.rows import OLD_LOGPROBS
from seamless_verl.trainer import trainer as seamless_trainer
from seamless_verl.trainer.trainer import SeamlessTrainer

pytestmark = pytest.mark.integration
WRITTEN: dict[str, Any] = {OLD_LOGPROBS: True}


@pytest.mark.parametrize(
    ("bypass", "tags", "by_verl"),
    [
        pytest.param(True, [WRITTEN, WRITTEN], [], id="written with the rows"),
        pytest.param(True, [WRITTEN, WRITTEN | {"is_padding": True}], [["b_0_0"]], id="padding has another row's"),
        pytest.param(True, [{}, WRITTEN], [["a_0_0"]], id="a row of an earlier release's checkpoint"),
        pytest.param(False, [WRITTEN, WRITTEN], [["a_0_0", "b_0_0"]], id="the trainer computes its own"),
    ],
)
def test_verl_makes_the_column_of_rows_that_lack_it(
    monkeypatch: pytest.MonkeyPatch, bypass: bool, tags: list[dict[str, Any]], by_verl: list[list[str]]
) -> None:
    asked = list[list[str]]()

    def made_by_verl(_: Any, batch: Any, metrics: Any) -> Any:
        asked.append(batch.keys)
        return batch

    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_old_log_prob", made_by_verl)
    monkeypatch.setattr(seamless_trainer, "agreement", lambda _: {"agrees": 1.0})
    trainer = SeamlessTrainer.__new__(SeamlessTrainer)
    trainer.counted = Counter()
    trainer.seamless = SimpleNamespace(tokens=SimpleNamespace(policy="train_all"))  # type: ignore[assignment]
    trainer.config = OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": bypass}}})
    metrics: dict[str, Any] = {}
    batch = KVBatchMeta(keys=["a_0_0", "b_0_0"], tags=[dict(tag) for tag in tags], partition_id="train")
    assert trainer._compute_old_log_prob(batch, metrics) is batch
    assert asked == by_verl
    assert metrics == ({} if bypass else {"agrees": 1.0})
