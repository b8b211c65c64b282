"""The CPU platform's pure parts: which machine it is for, its environment, and how adaptations fail."""

from __future__ import annotations

import pickle

import pytest

from seamless_verl.errors import ConfigError, HostMovedError
from seamless_verl.platform import detect
from seamless_verl.platform.adaptation import Adaptation
from seamless_verl.platform.environment import prepare
from seamless_verl.platform.megatron.tensor_types import use_host_types


@pytest.mark.parametrize(("asked", "accelerator", "cpu"), [
    ("", False, True), ("", True, False), ("cpu", True, True), ("CPU ", False, True), ("nvidia", False, False),
])  # fmt: skip
def test_the_platform_is_chosen_when_asked_for_or_when_alone(
    monkeypatch: pytest.MonkeyPatch, asked: str, accelerator: bool, cpu: bool
) -> None:
    monkeypatch.setattr(detect, "accelerator_present", lambda: accelerator)
    assert detect.on_cpu({"VERL_PLATFORM": asked}) is cpu


def test_the_environment_keeps_what_the_user_has_set() -> None:
    environ = {"OMP_NUM_THREADS": "2"}
    prepare(environ, cores={3, 1}, devices=2, pin=False)
    assert environ["OMP_NUM_THREADS"] == "2"
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
    named = dict(adaptation="types", symbol="a:b", written_for="host 1.0")
    use_host_types(compares, **named)
    use_host_types(compares, **named)
    assert compares("torch.HalfTensor") and compares("torch.FloatTensor")
    assert not compares("torch.cuda.FloatTensor")


def test_a_function_without_tensor_types_has_moved() -> None:
    with pytest.raises(HostMovedError, match="names no CUDA tensor type"):
        use_host_types(lambda x: x == "else", adaptation="types", symbol="a:b", written_for="host 1.0")


def test_errors_survive_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a.b", 3, "is odd", "Set a.b=4")))
    assert str(error) == "a.b=3: is odd. Set a.b=4" and isinstance(error, ValueError)
