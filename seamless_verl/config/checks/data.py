"""The data files: that they are there, have verl's columns, and fill at least one batch.

Only footers are read. Sources: verl/utils/dataset/rl_dataset.py,
verl/experimental/reward_loop/reward_manager, verl/trainer/ppo/v1/trainer_base.py `_init_dataloader`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from seamless_verl.config.checks.batches import TRAIN
from seamless_verl.config.checks.problem import AbsentError, Problem
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.errors import ConfigError

FILE_KEYS = ("data.train_files", "data.val_files")
SUFFIXES = (".parquet", ".json", ".jsonl")


@dataclass(frozen=True)
class Footer:
    """What a parquet file says about itself: top-level columns, which of them are lists, fields of structs, rows."""

    columns: frozenset[str]
    lists: frozenset[str]
    fields: dict[str, frozenset[str]]
    rows: int


@check
def check_data(settings: Settings) -> list[Problem]:
    """Every file of both sets; a data set class of the user's own reads what it likes.

    What is made anew before the run (`unmade`) may be otherwise now, and is refused by the run.
    """
    if settings.get("data.custom_cls.path") is not None:
        return []
    problems, rows = [], 0
    for key in FILE_KEYS:
        for path in _paths(settings, key):
            try:
                footer = _open(key, path)
            except ConfigError as error:
                problems.append(Problem.of(error))
                footer = None
            if footer is None:
                rows = -1
                continue
            problems += _columns(settings, key, path, footer)
            rows += footer.rows if key == FILE_KEYS[0] and rows >= 0 else 0
    found = problems or _enough(settings, rows)
    return [replace(one, warning=True) for one in found] if settings.unmade else found


def required_columns(settings: Settings) -> list[str]:
    """The prompt, and what verl's own reward managers read to score an answer."""
    prompt = settings.text("data.prompt_key", "prompt")
    own_manager = settings.get("reward.reward_manager.source", "register") != "register"
    return [prompt] if own_manager else [prompt, "data_source", "reward_model"]


def _paths(settings: Settings, key: str) -> list[str]:
    value = settings.get(key)
    paths = value if isinstance(value, list) else [value]
    if not paths or not all(isinstance(path, str) and path != "???" for path in paths):
        raise ConfigError(key, value, "must name at least one data file", f"Set {key}=<file>.parquet")
    return paths


def _open(key: str, path: str) -> Footer | None:
    """None for what has no footer to read: a remote file, or JSON."""
    if "://" in path:
        return None
    local = os.path.expanduser(path)
    if not os.path.isfile(local):
        raise AbsentError(key, path, "does not exist", f"Set {key} to a file that verl's data scripts made")
    if not path.endswith(SUFFIXES):
        raise ConfigError(key, path, "is of a kind verl does not read", f"Set {key} to a .parquet file")
    return _footer(key, local) if path.endswith(".parquet") else None


def _footer(key: str, path: str) -> Footer:
    from pyarrow import ArrowInvalid, parquet, types

    try:
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (ArrowInvalid, OSError) as error:
        reason = f"cannot be read as parquet: {error}"
        raise ConfigError(key, path, reason, f"Set {key} to a parquet file") from error
    structs = [field for field in schema if types.is_struct(field.type)]
    fields = {s.name: frozenset(s.type.field(i).name for i in range(s.type.num_fields)) for s in structs}
    lists = frozenset(field.name for field in schema if types.is_list(field.type) or types.is_large_list(field.type))
    return Footer(frozenset(schema.names), lists, fields, rows)


def _columns(settings: Settings, key: str, path: str, footer: Footer) -> list[Problem]:
    needed = required_columns(settings)
    missing = [name for name in needed if name not in footer.columns]
    if missing:
        reason = f"lacks the column {' and '.join(missing)} (it has {', '.join(sorted(footer.columns))})"
        return [Problem(key, path, reason, _column_way_out(settings, missing))]
    if (prompt := settings.text("data.prompt_key", "prompt")) not in footer.lists:
        reason = f"its column {prompt} has no lists of messages"
        return [Problem(key, path, reason, 'Write each prompt as [{"role": "user", "content": ...}]')]
    if "ground_truth" not in footer.fields.get("reward_model", {"ground_truth"}):
        way_out = "Write the expected answer into reward_model.ground_truth"
        return [Problem(key, path, "its column reward_model lacks the field ground_truth", way_out)]
    return []


def _column_way_out(settings: Settings, missing: list[str]) -> str:
    write = f"rite the file with columns {', '.join(required_columns(settings))}"
    prompt = settings.text("data.prompt_key", "prompt")
    if prompt not in missing:
        return f"W{write}"
    return f"Set data.prompt_key to the column of the messages (now {prompt}), or w{write}"


def _enough(settings: Settings, rows: int) -> list[Problem]:
    """`rows` of the train set; negative when not known."""
    limit = settings.integer("data.train_max_samples", -1, least=-1)
    used = min(rows, limit) if limit > 0 else rows
    train = settings.integer(TRAIN)
    if rows < 0 or used >= train:
        return []
    reason = f"is more than the {used} prompts of data.train_files"
    return [Problem(TRAIN, train, reason, f"Set {TRAIN}={max(used, 1)} or less, or give more data")]
