"""A checkpoint with weights that are not finite numbers is known by its files, unless its run looked at them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import with_weights

from seamless_verl.runtime.checkpoint_marker import record_finite, weights_not_finite

BAD = {
    "BF16": [0x7F80, 0xFF80, 0x7FC0, 0x7F81],  # infinities, and two NaN
    "F16": [0x7C00, 0xFC00, 0x7E00],
    "F32": [0x7F800000, 0xFF800000, 0x7FC00000],
    "F64": [0x7FF << 52, 0xFFF8 << 48],
}
LARGEST = {"BF16": 0x7F7F, "F16": 0x7BFF, "F32": 0x7F7FFFFF, "F64": (0x7FF << 52) - 1}


@pytest.mark.parametrize("dtype", BAD)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_number_that_is_not_finite_is_seen(tmp_path: Path, dtype: str, role: str) -> None:
    assert weights_not_finite(with_weights(tmp_path, dtype, [0, LARGEST[dtype]], role)) is None
    for number in BAD[dtype]:
        found = weights_not_finite(with_weights(tmp_path, dtype, [LARGEST[dtype], number], role))
        assert found == f"{tmp_path / role / 'model' / 'huggingface' / 'model.safetensors'}: second"


def test_what_a_run_looked_at_is_not_read_again(tmp_path: Path) -> None:
    record_finite(with_weights(tmp_path, "F32", BAD["F32"]))
    assert weights_not_finite(tmp_path) is None
    assert weights_not_finite(tmp_path / "missing") is None


@pytest.mark.parametrize(
    "kept", [0, 4, 20, -1], ids=["empty", "no header", "a part of the header", "a part of a tensor"]
)
def test_a_damaged_file_is_left_to_what_loads_it(tmp_path: Path, kept: int) -> None:
    with_weights(tmp_path, "F32", BAD["F32"])
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:kept])
    assert weights_not_finite(tmp_path) is None
