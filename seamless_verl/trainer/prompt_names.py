"""Names the prompts that a run draws, so that a resumed run gives them the same names.

verl gives each prompt a random uid. After a resume it draws what was drawn after the checkpoint a second time, under
another uid, and nothing that the journal has of it could be found again. Here a uid follows from the run, from how many
prompts it drew before, and from the prompt itself: another data set, or another order, gives other uids. Without
`data.seed` verl draws another subset (`data.train_max_samples`) at each start, so a run chooses a seed, and keeps it.

Owned state: the run's name and its data's seed, which its first start chose, and the number of prompts drawn. All are
in each checkpoint.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict import NonTensorStack, TensorDict

from seamless_verl.agent_loops.loops import task_of
from seamless_verl.runtime.files import write_atomically

STATE = "prompts.json"  # in a checkpoint's folder


class PromptNames:
    """The names of one run; a run that is not resumed chooses its own name."""

    def __init__(self) -> None:
        self.run, self.drawn = uuid.uuid4().hex, 0
        self.seed = int(self.run[:8], 16)

    def take(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Uids for the prompts that are drawn next; `rows` are theirs in the data set, with any uid."""
        first, self.drawn = self.drawn, self.drawn + len(rows)
        return [self._uid(first + number, row) for number, row in enumerate(rows)]

    def _uid(self, number: int, row: Mapping[str, Any]) -> str:
        task = {name: value for name, value in task_of(row).items() if name != "uid"}
        return str(uuid.uuid5(uuid.UUID(self.run), f"{number} {json.dumps(task, sort_keys=True)}"))

    def save(self, checkpoint: Path) -> None:
        write_atomically(checkpoint / STATE, json.dumps({"run": self.run, "drawn": self.drawn, "seed": self.seed}))

    def load(self, checkpoint: Path) -> None:
        """Goes on as the run that saved the checkpoint; as another one after a checkpoint of an earlier release."""
        file = checkpoint / STATE
        if file.is_file():
            state = json.loads(file.read_text(encoding="utf-8"))
            self.run, self.drawn = str(state["run"]), int(state["drawn"])
            self.seed = int(state.get("seed", self.seed))


def data_rows(batch: TensorDict) -> list[dict[str, Any]]:
    """The prompts of a batch as rows of the data set, without tensors."""
    columns = {name: column.tolist() for name, column in batch.items() if isinstance(column, NonTensorStack)}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(batch))]
