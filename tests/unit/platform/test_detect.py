"""The CPU platform's pure parts: which machine it is for, its environment, and how adaptations fail."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError, HostMovedError
from seamless_verl.platform import detect
from seamless_verl.platform.adaptation import Adaptation, use_host_types
from seamless_verl.platform.detect import set_cpu_environment


@pytest.mark.parametrize(("asked", "accelerator", "address", "built", "cpu"), [
    ("", False, "", False, True),
    ("", True, "", False, False),
    ("", False, "10.0.0.1:6379", False, False),
    ("", False, "local", False, True),
    ("", False, "", True, False),
    ("cpu", True, "auto", True, True),
    ("CPU ", False, "", False, True),
    ("nvidia", False, "", False, False),
])  # fmt: skip
def test_the_platform_is_chosen_when_asked_for_or_when_nothing_else_can_be_meant(
    monkeypatch: pytest.MonkeyPatch, asked: str, accelerator: bool, address: str, built: bool, cpu: bool
) -> None:
    monkeypatch.setattr(detect, "accelerator_present", lambda: accelerator)
    monkeypatch.setattr(detect, "torch_is_for_accelerators", lambda: built)
    assert detect.on_cpu({"VERL_PLATFORM": asked, "RAY_ADDRESS": address}) is cpu


@pytest.mark.parametrize(("asked", "accelerator", "address", "built", "only"), [
    ("", False, "10.0.0.1:6379", False, True),
    ("", False, "10.0.0.1:6379", True, False),
    ("", True, "10.0.0.1:6379", False, False),
    ("nvidia", False, "10.0.0.1:6379", False, False),
    ("", False, "local", False, False),
])  # fmt: skip
def test_a_run_in_a_cluster_with_a_torch_for_cpus_can_be_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, asked: str, accelerator: bool, address: str, built: bool, only: bool
) -> None:
    monkeypatch.setattr(detect, "accelerator_present", lambda: accelerator)
    monkeypatch.setattr(detect, "torch_is_for_accelerators", lambda: built)
    assert detect.can_only_be_cpu({"VERL_PLATFORM": asked, "RAY_ADDRESS": address}) is only


@pytest.mark.parametrize(("name", "found"), [
    ("nvidia3", True), ("nvidia12", True), ("kfd", True), ("davinci7", True),
    ("nvidiactl", False), ("nvidia-uvm", False), ("davinci_manager", False),
])  # fmt: skip
def test_an_accelerator_is_any_numbered_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, found: bool
) -> None:
    monkeypatch.setattr(detect, "nvidia_smi_answers", lambda: False)
    (tmp_path / name).touch()
    assert detect.accelerator_present(tmp_path) is found


@pytest.mark.parametrize(("version", "accelerator"), [
    ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
    ("debug = False\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n", True),
    ("cuda = '12.8'\nhip = None\n", True),
    ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\ngit_version = 'cuda'\nhip = None\n", False),
])  # fmt: skip
def test_the_build_of_torch_is_read_without_importing_it(version: str, accelerator: bool) -> None:
    assert detect.names_accelerator(version) is accelerator


def test_the_environment_keeps_what_the_user_has_set() -> None:
    environ = {"OMP_NUM_THREADS": "2"}
    set_cpu_environment(environ, cores={3, 1}, devices=2, pin=False)
    assert environ["OMP_NUM_THREADS"] == "2"
    assert environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    assert environ["SEAMLESS_CPU_CORES"] == "1,3"
    assert environ["SEAMLESS_CPU_DEVICES"] == "2" and environ["SEAMLESS_CPU_PIN"] == "0"


def adaptation(symbol: str, expects: str = "") -> Adaptation:
    return Adaptation("the-name", symbol, "host 1.0", "a reason", expects)


@pytest.mark.parametrize("symbol", ["no.such.module:x", "json:no_such", "json:loads.no_such"])
def test_a_symbol_that_is_gone_fails_by_the_adaptations_name(symbol: str) -> None:
    with pytest.raises(HostMovedError, match=r"the-name.*host 1.0") as caught:
        adaptation(symbol).verify()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_changed_signature_fails_too() -> None:
    assert adaptation("json:loads").verify() is __import__("json").loads
    with pytest.raises(HostMovedError, match="signature"):
        adaptation("json:loads", "(s)").verify()


def compares(kind: str) -> bool:
    return kind in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"] or kind == "torch.cuda.FloatTensor"


def test_tensor_types_are_rewritten_once_and_in_nested_constants() -> None:
    use_host_types(compares, adaptation("a:b"))
    use_host_types(compares, adaptation("a:b"))
    assert compares("torch.HalfTensor") and compares("torch.FloatTensor")
    assert not compares("torch.cuda.FloatTensor")


def test_a_function_without_tensor_types_has_moved() -> None:
    with pytest.raises(HostMovedError, match="names no CUDA tensor type"):
        use_host_types(lambda x: x == "else", adaptation("a:b"))


def test_errors_survive_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a.b", 3, "is odd", "Set a.b=4")))
    assert str(error) == "a.b=3: is odd. Set a.b=4" and isinstance(error, ValueError)
