"""Rewrites CUDA's tensor type names in functions of Megatron's optimizers to the host's.

They compare `Tensor.type()` with "torch.cuda.FloatTensor" and the like. Each such name is a constant in their code, so
the smallest change is that constant: the functions get the same code with the host's type names in it.
"""

from __future__ import annotations

from types import CodeType, FunctionType

from seamless_verl.errors import HostMovedError

CUDA_TYPES = "torch.cuda."
REWRITTEN = "seamless_host_types"  # attribute of a rewritten function


def host_constant(constant: object) -> object:
    """The same constant with CUDA's tensor types replaced by the host's, in nested code as well."""
    if isinstance(constant, str) and constant.startswith(CUDA_TYPES):
        return constant.replace(CUDA_TYPES, "torch.", 1)
    if isinstance(constant, tuple):
        return tuple(host_constant(item) for item in constant)
    if isinstance(constant, CodeType):
        return host_code(constant)
    return constant


def host_code(code: CodeType) -> CodeType:
    """The same code object with host tensor types among its constants."""
    return code.replace(co_consts=tuple(host_constant(item) for item in code.co_consts))


def use_host_types(function: object, *, adaptation: str, symbol: str, written_for: str) -> None:
    """Rewrite a function's tensor type constants in place, once.

    Raises:
        HostMovedError: it has no such constant: the host compares in some other way now.
    """
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, FunctionType):
        raise HostMovedError(adaptation, symbol, written_for, f"{type(function).__name__}, not a function")
    if hasattr(plain, REWRITTEN):
        return
    rewritten = host_code(plain.__code__)
    if rewritten.co_consts == plain.__code__.co_consts:
        raise HostMovedError(adaptation, symbol, written_for, "it names no CUDA tensor type")
    plain.__code__ = rewritten
    setattr(plain, REWRITTEN, True)
