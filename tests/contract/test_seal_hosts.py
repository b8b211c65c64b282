"""Pins what the seal of an engine uses of vLLM and verl: after an upgrade, a failing test names what changed."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from support.hosts import attributes, found, listed, parameters

USER = "seal"
COLUMN = "vllm.lora.layers.column_parallel_linear:"
LORA = "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"
MERGED = COLUMN + "MergedColumnParallelLinearWithLoRA"
ROW = "vllm.lora.layers.row_parallel_linear:RowParallelLinearWithLoRA"
MANAGER = "vllm.lora.model_manager:LoRAModelManager"
EXTENSION = "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension."
LOADED = "vllm.model_executor.model_loader.utils:process_weights_after_loading"
# What we call, or know the results of, with its parameters by name and in order.
CALLED = {
    LORA + ".set_lora": "self index lora_a lora_b",
    MERGED + ".set_lora": "self index lora_a lora_b",
    **{f"{owner}.slice_{which}": f"self {which}" for owner in (MERGED, ROW) for which in ("lora_a", "lora_b")},
    MANAGER + ".activate_adapter": "self lora_id",
    "vllm.lora.peft_helper:PEFTHelper.from_dict": "config_dict",
    "vllm.lora.utils:parse_fine_tuned_lora_name": "name weights_mapper",
    "vllm.lora.utils:is_base_embedding_weights": "name",
    EXTENSION + "_iter_all_models": "self",
    LOADED: "model model_config target_device",
}
# What we read of its objects.
HELD = {
    LORA: "lora_a_stacked lora_b_stacked n_slices tp_size",
    MANAGER: "modules packed_modules lora_index_to_id",
    "vllm.lora.peft_helper:PEFTHelper": "vllm_lora_scaling_factor",
    "vllm.config:ParallelConfig": "world_size pipeline_parallel_size",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "model",
}
# Layers whose buffers are filled by one of the two methods that we know; those of others are named as not sealed.
FILLED = {
    COLUMN + "ColumnParallelLinearWithLoRA": LORA,
    COLUMN + "QKVParallelLinearWithLoRA": LORA,
    ROW: LORA,
    "vllm.lora.layers.replicated_linear:ReplicatedLinearWithLoRA": LORA,
    COLUMN + "MergedQKVParallelLinearWithLoRA": MERGED,
}


@pytest.mark.parametrize("symbol", CALLED)
def test_what_we_call_takes_what_it_took(symbol: str) -> None:
    assert parameters(found(symbol, USER)) == CALLED[symbol]


@pytest.mark.parametrize(("owner", "name"), listed(HELD))
def test_its_objects_hold_what_we_read(owner: str, name: str) -> None:
    assert name in attributes(found(owner, USER))


@pytest.mark.parametrize("layer", FILLED)
def test_a_layer_s_adapter_is_filled_by_a_method_that_we_know(layer: str) -> None:
    assert found(layer, USER).set_lora is found(FILLED[layer], USER).set_lora


def test_a_model_has_the_manager_of_its_adapters() -> None:
    assert "self.model.lora_manager = self" in inspect.getsource(found(MANAGER + ".__init__", USER))


def test_an_adapter_is_rounded_to_the_engine_s_dtype_before_b_is_multiplied_by_its_scale() -> None:
    loaded = inspect.getsource(found("vllm.lora.lora_model:LoRAModel.from_lora_tensors", USER))
    assert "lora_b = tensor.to(device=device, dtype=dtype)" in loaded
    merged = inspect.getsource(found(MANAGER + "._create_merged_loras_inplace", USER))
    assert "for lora in lora_model.loras.values():\n            lora.optimize()" in merged
    weights = found("vllm.lora.lora_weights:LoRALayerWeights", USER)
    b = torch.full((2, 2), 3.0, dtype=torch.bfloat16)
    assert torch.equal(weights("q", 8, 16, b, b.clone()).optimize().lora_b, b * 2.0)


def test_an_adapter_s_buffers_have_its_slices_in_its_slot_and_zeros_beside_them() -> None:
    buffers = [torch.full((1, 1, 4, 5), 7.0) for _ in range(2)]
    layer = SimpleNamespace(lora_a_stacked=buffers[:1], lora_b_stacked=buffers[1:], n_slices=1, tp_size=1)
    layer.reset_lora = lambda index: found(LORA + ".reset_lora", USER)(layer, index)
    found(LORA + ".set_lora", USER)(layer, 0, torch.ones(2, 5), torch.ones(4, 2))
    assert [float(buffer[0, 0].sum()) for buffer in buffers] == [10.0, 8.0]


def test_kernels_pack_what_was_loaded_after_all_of_it_was_copied() -> None:
    """What is compared before that is what was sent, also where a kernel packs in the same memory."""
    update = inspect.getsource(found(EXTENSION + "update_weights_from_ipc", USER))
    received = update.index("receiver.receive_weights(on_bucket_received=")
    assert received < update.index("process_weights_after_loading(model, model_config, self.device)")
    assert "quant_method.process_weights_after_loading(module)" in inspect.getsource(found(LOADED, USER))
    adapter = update.index("elif peft_config and base_sync_done:", received)
    assert "no post-process" in update[adapter : update.index("elif", adapter + 1)]
