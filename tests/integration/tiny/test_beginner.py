"""A beginner is made once for the same settings and the same code."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.tiny.beginner import make_beginner

pytestmark = pytest.mark.integration


def test_it_is_made_again_when_its_settings_or_its_code_change_or_its_warm_start_failed(tmp_path: Path) -> None:
    (code := tmp_path / "warm_start.py").write_text("first")
    folder, made = tmp_path / "model", list[tuple[int, int]]()

    def warm_start(folder: Path, seed: int, steps: int) -> None:
        assert (folder / "model.safetensors").is_file()
        made.append((seed, steps))
        if len(made) == 4:
            raise KeyboardInterrupt

    def make(seed: int = 0, steps: int = 1) -> int:
        make_beginner(folder, seed, steps, code=[code], warm_start=warm_start)
        return len(made)

    assert [make(), make()] == [1, 1]
    assert [make(steps=2), make(steps=2)] == [2, 2] and made[-1] == (0, 2)
    code.write_text("second")
    assert [make(steps=2), make(steps=2)] == [3, 3]
    with pytest.raises(KeyboardInterrupt):
        make(seed=1)
    assert [make(seed=1), make(seed=1)] == [5, 5]
