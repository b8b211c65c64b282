"""Gives vLLM's capturer of routed experts what its CPU kernels choose; on accelerators vLLM does it itself.

vLLM asks the router of each mixture-of-experts layer for its choice. On the CPU the experts of unquantized weights
choose for themselves, inside of their own call: vLLM 0.29 refuses to capture there, and 0.24 records expert 0 for every
token. The choice is the same function's in both, `select_experts`; here its ids are also given to the capturer.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

EXPERTS_0_29 = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
EXPERTS_0_24 = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"


def report_routes() -> None:
    """Make the CPU's unquantized experts of this process report what they choose; may be called again.

    Raises:
        ImportError or AttributeError: vLLM has moved the choice; tests/contract say so by its name.
    """
    try:
        experts = importlib.import_module(EXPERTS_0_29).CPUUnquantizedExperts
    except AttributeError:
        _report_in_0_24()
    else:
        _report_in_0_29(experts)


def _report_in_0_29(experts: Any) -> None:
    """Each experts object has the function that takes its ids, once `set_capture_fn` was called."""
    select = experts._select_experts
    if hasattr(select, "__wrapped__"):
        return

    @functools.wraps(select)
    def select_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = select(self, *args, **kwargs)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(ids)
        return weights, ids

    experts._select_experts = select_and_report
    experts.supports_routing_replay_capture = lambda self: True


def _report_in_0_24() -> None:
    """The layer's router has the function that takes the ids; the choice knows no layer."""
    runner, module = importlib.import_module(RUNNER).MoERunner, importlib.import_module(EXPERTS_0_24)
    apply, select = runner._apply_quant_method, module.select_experts
    if hasattr(select, "__wrapped__"):
        return
    layers: list[
        Callable[[Any], None] | None
    ] = []  # of the layer that computes, last; a process has one thread of these

    @functools.wraps(apply)
    def apply_in_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers.append(getattr(self.router, "capture_fn", None))
        try:
            return apply(self, *args, **kwargs)
        finally:
            layers.pop()

    @functools.wraps(select)
    def select_and_report(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        if layers and layers[-1] is not None:
            layers[-1](ids)
        return weights, ids

    runner._apply_quant_method, module.select_experts = apply_in_layer, select_and_report
