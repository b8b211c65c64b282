"""verl's Megatron engine computes what sequences of a micro-batch share once, where that is proven to be exact.

Only the pass through the model is ours. verl's engine computes log-probabilities, entropies and sums of squares of the
logits, here on the edges into responses, and they are given back in its own nested shape. So all losses stay the same
functions of them, and no logits are made of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id
from verl.utils.megatron_utils import unwrap_model
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine.megatron import transformer_impl

from seamless_verl.platform.adaptation import rebound
from seamless_verl.platform.megatron.both_ways import agrees, few_sequences, largest_of_ranks
from seamless_verl.platform.megatron.layers import SDPAttention
from seamless_verl.platform.megatron.micro_batches import packed_micro_batches
from seamless_verl.shared_prefixes.forward import edge_logits, on_device, row_values, unpack_edges, unpack_rows
from seamless_verl.shared_prefixes.layout import Forest, Ints, build_forest
from seamless_verl.shared_prefixes.ranks import SAVED, TOKENS

LEAST_SAVED = 0.05
"""Share of a micro-batch's tokens from which a forest is computed in place of them."""


class SharesPrefixes:
    """Stands before a Megatron engine of verl among a class's bases; it shares when `share_prefixes` was called.

    A micro-batch in which little is shared, or that asks for what is not proven, is verl's own. Before the first pass
    the model is asked both ways for a few sequences: one that reads positions otherwise is found there, on all ranks.
    """

    sharing = False
    compared = False

    def share_prefixes(self) -> str | None:
        """Called on all ranks when the model is built: share from now on, or return what stands against it here, or on
        another rank."""
        found = obstacle(self)
        self.sharing = not largest_of_ranks(found is not None)
        return found if found is not None or self.sharing else "what another rank has"

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """verl's pass over a rank's sequences, in micro-batches that keep together what shares a prefix."""
        run = super().forward_backward_batch  # type: ignore[misc]
        if not self.sharing or computes_each(data):
            return run(data, loss_function, forward_only)
        if not self.compared:
            self.compared = True
            with torch.no_grad():
                self.sharing = agrees(self, lambda: run(few_sequences(self), None, True))
            return self.forward_backward_batch(data, loss_function, forward_only)
        with rebound(transformer_impl, prepare_micro_batches=packed_micro_batches):
            return run(data, loss_function, forward_only)

    def forward_step(
        self,
        batch_iter: Iterator[Any],
        model: Any,
        logits_processor_func: Callable[..., Any] | None,
        postprocess_micro_batch_func: Callable[..., Any],
    ) -> Any:
        """One micro-batch: what the model says of it, and the function that makes the loss of that."""
        step = super().forward_step  # type: ignore[misc]
        if not self.sharing:
            return step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)
        batch = next(batch_iter)
        forest = shareable(batch)
        finish = postprocess_micro_batch_func
        if torch.is_grad_enabled():
            counts = {SAVED: forest.saved if forest else 0, TOKENS: sum(map(len, batch["input_ids"].unbind()))}
            finish = partial(with_counts, finish, counts)
        if forest is None:
            return step(iter([batch]), model, logits_processor_func, finish)
        batch = batch.to(get_device_id())
        return self.of_forest(forest, batch, model, logits_processor_func), partial(finish, data=batch)

    def of_forest(self, forest: Forest, batch: Any, model: Any, loss: Callable[..., Any] | None) -> Any:
        """What verl's engine computes of logits, nested [sequences, tokens]; of a stage before the last its output."""
        device, gpt = batch["input_ids"].device, unwrap_model(model)
        edges = edges_read(forest, batch)
        logits = edge_logits(model, gpt, forest, edges, device)
        if not gpt.post_process:
            return logits
        temperature = torch.full(logits.shape[:2], temperatures(batch)[0], dtype=torch.float32, device=device)
        ask = partial(tu.get_non_tensor_data, batch, default=False)
        computed = self._lm_head_logits_processor(  # type: ignore[attr-defined]
            logits,
            on_device(forest.labels[edges], device)[None],
            temperature,
            calculate_sum_pi_squared=ask(key="calculate_sum_pi_squared"),
            calculate_entropy=ask(key="calculate_entropy"),
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=loss,
            batch=batch,
            data_format="thd",
        )
        return {name: unpack_edges(values, forest, edges) for name, values in computed.items()}


class SharesValues(SharesPrefixes):
    """The same for a value model, which says something of each token and not of each edge."""

    def of_forest(self, forest: Forest, batch: Any, model: Any, loss: Callable[..., Any] | None) -> Any:
        """The value of each token, nested [sequences, tokens]; of a stage before the last its output."""
        gpt = unwrap_model(model)
        values = row_values(model, gpt, forest, batch["input_ids"].device)
        return unpack_rows(values, forest) if gpt.post_process else values


def shareable(batch: Any) -> Forest | None:
    """The forest of a micro-batch's sequences; None where it saves too little, or the batch asks for more than this."""
    images = extract_multi_modal_inputs(batch.get("multi_modal_inputs", []))
    if computes_each(batch) or images or len(set(temperatures(batch))) != 1:
        return None
    forest = build_forest([ids.cpu().numpy() for ids in batch["input_ids"].unbind()])
    return forest if share_saved(forest) >= LEAST_SAVED and len(forest.edges) else None


def edges_read(forest: Forest, batch: Any) -> Ints:
    """The edges into responses, whose values alone verl reads; all edges of a batch that says of none."""
    if "responses" not in batch:
        return np.arange(len(forest.edges))
    return forest.edges_into(map(len, batch["responses"].unbind()))


def computes_each(batch: Any) -> bool:
    """Whether a batch asks, on all ranks alike, for what is computed of each sequence by itself alone."""
    ask = partial(tu.get_non_tensor_data, batch)
    distills = any(ask(key=key, default=False) for key in ("distillation_use_topk", "distillation_only"))
    return distills or ask(key="pad_mode", default=DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING


def share_saved(forest: Forest) -> float:
    """Of the tokens of a micro-batch, the share that is not computed again."""
    return forest.saved / (forest.saved + len(forest.tokens)) if forest.saved else 0.0


def temperatures(batch: Any) -> list[float]:
    """The temperature of each sequence, or the one of all; 1 in a batch of values, which has none."""
    given = batch["temperature"] if "temperature" in batch else 1.0  # noqa: SIM401 - `get` wraps what is no tensor
    return given.flatten().tolist() if isinstance(given, Tensor) else [float(given)]


def with_counts(postprocess: Callable[..., Any], counts: dict[str, int], output: Any, **more: Any) -> Any:
    """What `postprocess` returns, with the counts of tokens among the metrics that are its last element."""
    result = postprocess(output, **more)
    result[-1]["metrics"] |= counts
    return result


def obstacle(engine: Any) -> str | None:
    """The first thing of a built engine that a forest is not proven for; None without any."""
    own, of_model, config = engine.engine_config, engine.model_config, engine.tf_config
    attentions = [m.core_attention for chunk in engine.module for m in chunk.modules() if hasattr(m, "core_attention")]
    gpt = unwrap_model(engine.module[0])
    against = {
        "a model other than Megatron's GPT": not isinstance(gpt, GPTModel),
        "several chunks of a model": len(engine.module) != 1,
        "context parallelism": own.context_parallel_size > 1 or own.dynamic_context_parallel,
        "experts": bool(config.num_moe_experts),
        "multi-token prediction": bool(of_model.mtp.enable or config.mtp_num_layers),
        "adapters": of_model.lora.get("rank", 0) > 0 or getattr(engine, "peft_cls", None) is not None,
        "a model of images": hasattr(of_model.hf_config, "vision_config"),
        "fused kernels for the loss": own.use_fused_kernels,
        "padded batches (use_remove_padding=False)": not own.use_remove_padding,
        "padding to a fixed length": own.pad_to_length,
        "replayed routes": engine.enable_routing_replay,
        "loss per token in Megatron": config.calculate_per_token_loss,
        "attention that is linear, or sparse": config.experimental_attention_variant is not None,
        "latent attention": config.multi_latent_attention,
        "a sliding window": config.window_size is not None,
        "attention with sinks": config.softmax_type != "vanilla",
        "attention other than the plain layers'": any(type(one) is not SDPAttention for one in attentions),
        "dropout": bool(config.attention_dropout or config.hidden_dropout),
        "positions other than rotary": gpt.position_embedding_type != "rope",
        "fused rotary embeddings": config.apply_rope_fusion,
        "FP8": config.fp8 is not None,
    }
    return next((name for name, found in against.items() if found), None)
