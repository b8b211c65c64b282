"""Checks of files: data, the user's reward function, and the folder of checkpoints.

Data files exist, have verl's columns and fill at least one batch; only their footers are read. The reward function
can be found by its file and name. The folder can be written, and no other run writes there.

Sources: verl/utils/dataset/rl_dataset.py, verl/experimental/reward_loop/reward_manager,
verl/experimental/reward_loop/reward_loop.py `migrate_legacy_reward_impl`, verl/trainer/ppo/reward.py
`get_custom_reward_fn`, verl/utils/import_utils.py `load_module`, verl/trainer/ppo/v1/trainer_base.py
`_init_dataloader` and `fit`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.config.checks.batches import TRAIN
from seamless_verl.config.model import model_config
from seamless_verl.config.paths import (
    IN_USE,
    USE_ANOTHER,
    existing_folder,
    lock_error,
    looking_at,
    without_lock,
    write_error,
    writes_checkpoints,
)
from seamless_verl.config.roles import brings_code, joins_cluster, trains_adapter
from seamless_verl.config.settings import AbsentError, Problem, Settings, check
from seamless_verl.config.sources import check_dotted, check_name
from seamless_verl.config.verl_keys import FOLDER, RESERVED_COLUMNS
from seamless_verl.errors import ConfigError
from seamless_verl.resources.memory_fit import gigabytes
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.runtime.locks import is_locked

FILE_KEYS = ("data.train_files", "data.val_files")
SUFFIXES = (".parquet", ".json", ".jsonl")


@dataclass(frozen=True)
class Footer:
    """The schema of a parquet file: top-level columns, which of them are lists, fields of structs, rows."""

    columns: frozenset[str]
    lists: frozenset[str]
    fields: dict[str, frozenset[str]]
    rows: int


@check
def check_data(settings: Settings) -> list[Problem]:
    """Every file of both sets; nothing where the user's own data set class reads them.

    Where files may be made again before the run (`unmade`), problems are warnings; the run itself refuses them.
    """
    if settings.get("data.custom_cls.path") is not None:
        return []
    problems, rows = [], dict.fromkeys(FILE_KEYS, 0)  # negative where not known
    for key in FILE_KEYS:
        for path in _paths(settings, key):
            try:
                footer = _open(key, path)
            except ConfigError as error:
                problems += Problem.all_of(error)
                footer = None
            if footer is None:
                rows[key] = -1
                continue
            problems += _columns(settings, key, path, footer)
            rows[key] += footer.rows if rows[key] >= 0 else 0
        if not rows[key]:
            problems.append(Problem(key, settings.get(key), "has no rows", f"Set {key} to a file with prompts"))
    found = problems or _enough(settings, rows[FILE_KEYS[0]])
    return [problem.changed(warning=True, unmade=True) for problem in found] if settings.unmade else found


def required_columns(settings: Settings) -> list[str]:
    """The prompt, and the columns that verl's own reward managers read to score an answer."""
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
    """None for a file without a footer that can be read: a remote file, or JSON."""
    if "://" in path:
        return None
    local = os.path.expanduser(path)
    if not os.path.isfile(local):
        raise AbsentError(key, path, "does not exist", f"Set {key} to a file that verl's data scripts made")
    if not path.endswith(SUFFIXES):
        raise ConfigError(key, path, "is of a kind verl does not read", f"Set {key} to a .parquet file")
    return footer_of(key, local) if path.endswith(".parquet") else None


def footer_of(key: str, path: str) -> Footer:
    """Of a parquet file; ConfigError for one that is none."""
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
    if taken := sorted(footer.columns & RESERVED_COLUMNS):
        reason = f"its column {' and '.join(taken)} has a name of what the run computes"
        return [Problem(key, path, reason, f"Rename it in the file, for example to my_{taken[0]}")]
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
    return [Problem(TRAIN, train, reason, f"Set {TRAIN}={used} or less, or give more data")]


FUNCTION = "reward.custom_reward_function"
LEGACY = "custom_reward_function"  # verl copies it over the other when it has a value
PACKAGE, FILE = "pkg://", "file://"


@check
def check_reward_function(settings: Settings) -> list[Problem]:
    """A file, or a module as `pkg://package.module`, that defines the function."""
    node = LEGACY if any(settings.get(LEGACY, {}).values()) else FUNCTION
    if not settings.get(f"{node}.path"):
        return []
    path, name = settings.text(f"{node}.path"), _function_name(settings, node)
    if path.startswith(PACKAGE):
        _in_package(settings, node, path, name)
    else:
        _in_file(settings, node, path, name)
    return []


def _function_name(settings: Settings, node: str) -> str:
    """ConfigError for the legacy node without a name: verl then has none, since it copies the whole node."""
    default = settings.get(f"{FUNCTION}.name", "compute_score")
    if node == LEGACY and settings.get(f"{LEGACY}.name") is None:
        path = settings.get(f"{LEGACY}.path")
        way_out = (
            f"Add {LEGACY}.name={default}, or write {FUNCTION}.path={path} instead, where that name is the default"
        )
        raise ConfigError(f"{LEGACY}.name", None, "has no value", way_out)
    return settings.text(f"{node}.name")


def _in_package(settings: Settings, node: str, path: str, name: str) -> None:
    module = path.removeprefix(PACKAGE).replace("/", ".")
    if not brings_code(settings):
        way_out = f"Install it, put its folder on PYTHONPATH, or name a file: {node}.path=<file>.py"
        check_dotted(f"{node}.path", path, f"{module}.{name}", way_out)


def _in_file(settings: Settings, node: str, path: str, name: str) -> None:
    key, file = f"{node}.path", path.removeprefix(FILE)
    if brings_code(settings) and not os.path.isabs(file):
        return
    if not os.path.isfile(file):
        expands = os.path.isfile(os.path.expanduser(file))
        way_out = f"Set {key}={os.path.expanduser(file)}" if expands else f"Set {key} to a .py file that defines {name}"
        reason = "the ~ is not expanded" if expands else f"there is no such file (looked for from {os.getcwd()})"
        raise ConfigError(key, path, reason, way_out)
    if not file.endswith(".py"):
        raise ConfigError(key, path, "is not a .py file", f"Set {key} to a .py file that defines {name}")
    check_name(f"{node}.name", name, path, file, name)


MODE, PATH = "trainer.resume_mode", "trainer.resume_from_path"
STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
LOADED = ("model", "optimizer", "extra")
SAVED_BYTES = {"model": 2, "hf_model": 2, "optimizer": 12}  # of a parameter: bf16; in fp32 its value and two moments
ELSEWHERE = f"{FOLDER} to another folder, or {MODE}=disable"


@check
def check_folder(settings: Settings) -> list[Problem]:
    """The folder and its lock can be made and written, and no other run writes there.

    In a cluster it may be on another machine.
    """
    value = settings.get(FOLDER)
    if not isinstance(value, str) or "://" in value or joins_cluster(settings):
        return []
    with looking_at(FOLDER, value):
        path = Path(value).absolute()
        parent = existing_folder(path)
    if (why := write_error(parent)) is not None:
        return [Problem(FOLDER, value, f"cannot be made in {parent}: {why}", f"Set {FOLDER} to a folder of yours")]
    if _in_use(path):
        return [Problem(FOLDER, value, IN_USE, USE_ANOTHER)]
    if writes_checkpoints(settings.mode, settings.get("trainer.save_freq")) and (why := lock_error(path)) is not None:
        return Problem.all_of(without_lock(value, why))
    return _room(settings, value, parent)


def _room(settings: Settings, folder: str, place: Path) -> list[Problem]:
    """A warning where the disk has less room than one checkpoint takes, as far as the model's parameters show that."""
    if settings.integer("trainer.save_freq", -1, least=-1) <= 0 or trains_adapter(settings):
        return []
    config = model_config(settings, "actor_rollout_ref.model")
    facts = None if config is None else ModelFacts.read(config)
    contents = settings.get("actor_rollout_ref.actor.checkpoint.save_contents", LOADED)
    needed = 0 if facts is None else facts.parameters * sum(SAVED_BYTES.get(name, 0) for name in contents)
    free = shutil.disk_usage(place).free
    if free >= needed:
        return []
    reason = f"has {gigabytes(free)} free, and the actor's part of a checkpoint takes about {gigabytes(needed)}"
    return [Problem(FOLDER, folder, reason, f"Free the disk, or set {FOLDER} to a folder on another", warning=True)]


@check
def check_steps(settings: Settings) -> list[Problem]:
    """At least one step of training."""
    settings.integer(EPOCHS, 1)
    steps = settings.get(STEPS)
    if steps is None or (isinstance(steps, int) and not isinstance(steps, bool) and steps > 0):
        return []
    way_out = f"Set {STEPS}=1 or more, or {STEPS}=null to train for {EPOCHS}"
    return [Problem(STEPS, steps, "must be a whole number of at least 1, or null", way_out)]


def _in_use(folder: Path) -> bool:
    """Whether another run holds its lock; an error here is left to the run, which meets it again."""
    try:
        return is_locked(folder)
    except OSError:
        return False


def parquet_files(settings: Settings, key: str) -> list[str]:
    """Those data files that are parquet on this machine."""
    value = settings.get(key)
    paths = value if isinstance(value, list) else [value]
    local = [os.path.expanduser(path) for path in paths if isinstance(path, str) and path.endswith(".parquet")]
    return [path for path in local if os.path.isfile(path)]  # others are reported by check_data
