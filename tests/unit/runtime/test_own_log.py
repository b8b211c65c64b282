"""Which lines of a log name an error."""

from __future__ import annotations

import pytest

from seamless_verl.runtime.own_log import errors_in


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("ValueError: No available memory", "ValueError: No available memory"),
        ("  torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("(EngineCore pid=7) ERROR 11-29 [core.py:12] ValueError: no room", "ValueError: no room"),
        ("serve.py serve: error: argument --dtype: no choice", "error: argument --dtype: no choice"),
        ("serve.py: error: unrecognized arguments: --no-such", "error: unrecognized arguments: --no-such"),
        ("INFO 11-29 [a.py:1] an error: was seen", None),
        ("    raise ValueError('x')", None),
        ("KeyError:", None),
        ("WARNING 11-29 [a.py:1] ImportError: no module x", None),
    ],
)  # fmt: skip
def test_a_line_names_an_error_or_not(line: str, error: str | None) -> None:
    assert errors_in(f"before\n{line}\nbehind") == ([error] if error else [])
