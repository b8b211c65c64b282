"""What the CPU platform adapts in its hosts, and what Ray keeps to itself: a mover is named by the test that fails."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

import pytest
import ray
from support.hosts import found, parameters

from seamless_verl.platform.adaptation import ADAPTATIONS, Adaptation
from seamless_verl.platform.detect import PRESTART
from seamless_verl.platform.megatron.bridge import import_bridge

RAY = {
    "ray.experimental.internal_kv:_internal_kv_put": "key value overwrite * namespace",
    "ray.experimental.internal_kv:_internal_kv_get": "key * namespace",
    "ray.experimental.internal_kv:_internal_kv_del": "key * del_by_prefix namespace",
    "ray._private.state:available_resources_per_node": "",
}


@pytest.mark.parametrize("symbol", RAY)
def test_what_we_call_of_rays_own_takes_what_it_took(symbol: str) -> None:
    assert parameters(found(symbol, "seamless-trainer")) == RAY[symbol]


@pytest.mark.parametrize("adaptation", ADAPTATIONS, ids=lambda a: f"{a.name}-{a.symbol.split(':')[1]}")
def test_every_adapted_symbol_is_where_it_was(adaptation: Adaptation) -> None:
    if adaptation.symbol.startswith("megatron.bridge"):
        import_bridge()
    adaptation.verify()
    assert adaptation.written_for and adaptation.reason


WITHOUT_TE = """
import importlib, sys
import pytest
with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
    importlib.import_module("megatron.bridge")
for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
    del sys.modules[name]
import builtins
before = builtins.__import__
from seamless_verl.platform.megatron.bridge import import_bridge
import_bridge()
import_bridge()
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.core.models.gpt import gpt_layer_specs
assert builtins.__import__ is before and "transformer_engine" not in sys.modules and not gpt_layer_specs.HAVE_TE
assert AutoBridge.from_hf_pretrained and LoRA(dim=4).dim == 4
"""


def test_megatron_bridge_is_imported_without_transformer_engine_and_nothing_else_is_told_of_it() -> None:
    """When the first import works, the adaptation can go."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_TE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_ray_has_the_setting_that_keeps_idle_workers_from_starting() -> None:
    """One that it does not know it would pass over without a word."""
    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    assert f"\0{PRESTART.removeprefix('RAY_')}\0".encode() in raylet.read_bytes()


def test_multiprocessing_spawns_by_a_command_of_the_form_that_forks_of_the_forkserver_run() -> None:
    executable, *options, flag, code, last = spawn.get_command_line(tracker_fd=3, pipe_handle=4)
    assert executable == spawn.get_executable() and flag == "-c" and last == "--multiprocessing-fork"
    assert all(option.startswith("-") for option in options)
    assert code == "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=3, pipe_handle=4)"


def test_the_platform_answers_all_that_verl_asks_of_one() -> None:
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    platform = PlatformRegistry.get("cpu")
    assert platform is not None and not getattr(platform, "__abstractmethods__", None)
    asked = {n for n, v in vars(PlatformBase).items() if getattr(v, "__isabstractmethod__", False)}
    assert asked <= set(vars(platform))
    assert PlatformRegistry.registered_names()[-1] == "cpu"  # probed last: never beside an accelerator
