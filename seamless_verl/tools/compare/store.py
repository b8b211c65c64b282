"""The files of a comparison: the report, the raw data as parquet, and the manifest with which it is run again.

    OUT/report.md report.html manifest.json runs.parquet steps.parquet lengths.parquet
    OUT/<arm>-seed<seed>-r<round>/ log.txt logged.jsonl steps.jsonl use.json surroundings.json done

Each is replaced whole. A run whose `done` has the very command line of a run that is asked for, and the same config,
files, versions and code, is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seamless_verl.runtime.files import replaced_file
from seamless_verl.tiny.files import writing_to
from seamless_verl.tools.compare.comparison import ArmFacts, Comparison, Run
from seamless_verl.tools.compare.figures import number
from seamless_verl.tools.compare.job import Job
from seamless_verl.tools.compare.learning import collapse, reward_points, targets, times_to_target
from seamless_verl.tools.compare.lengths import sample_rows
from seamless_verl.tools.compare.machine import UseSample, code_state, machine_words, versions
from seamless_verl.tools.compare.running import Step
from seamless_verl.tools.compare.workloads import LOOPS_FILE

STEPS, USE, SURROUNDINGS, DONE = "steps.jsonl", "use.json", "surroundings.json", "done"
OWN_PLACES = {"trainer": ("default_local_dir", "project_name", "experiment_name"), "data": ("seed",)}
"""Keys that say where a run writes, and its seed, which its command line has: an arm is probed for one seed only."""
SET_HERE = {"DATA", "HF_HUB_OFFLINE", "MAIN", "PYTHON"}
"""Variables of a recipe's script that a comparison sets itself, or that do not change what is made."""


@dataclass(frozen=True)
class StoredRun:
    """What a finished run logged, what was seen of its devices by seconds since its start, and where it was made."""

    steps: list[Step]
    use: list[UseSample]
    surroundings: Mapping[str, Any]


@contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Makes the folder of the report; ConfigError for `--out` where it, or the block, cannot write there."""
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        yield


def fingerprint(config: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """What a run is made of beside its command line, by kind; of its composed config and its job's files the SHA-256.

    A run of an earlier comparison is taken instead of a new one only where all of it is the same.
    """
    folder = [] if job.script is None else sorted(path for path in job.script.parent.iterdir() if path.is_file())
    files = folder if job.workload is None else [job.data / LOOPS_FILE]
    return {
        "config": config_hash(config),
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "versions": versions(),
        "code": code_state(),
        "environment": {} if job.script is None else environment_of(job.script.read_text()),
    }


def environment_of(script: str) -> dict[str, str]:
    """The variables that are set of those that a recipe's script reads, such as how many questions it makes."""
    names = sorted(set(re.findall(r"\$\{([A-Z_]+):-", script)) - SET_HERE)
    return {name: os.environ[name] for name in names if name in os.environ}


def config_hash(config: Mapping[str, Any]) -> str:
    """Of a composed config without `OWN_PLACES`."""
    kept = deepcopy(dict(config))
    for node, names in OWN_PLACES.items():
        for name in names:
            kept.get(node, {}).pop(name, None)
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def write_run(folder: Path, identity: Mapping[str, Any], run: StoredRun) -> None:
    """`done` comes last."""
    samples = [[sample.began, sample.ended, *sample.shares] for sample in run.use]
    (folder / STEPS).write_text("".join(json.dumps(step) + "\n" for step in run.steps))
    (folder / USE).write_text(json.dumps(samples))
    (folder / SURROUNDINGS).write_text(json.dumps(run.surroundings, indent=1) + "\n")
    with replaced_file(folder / DONE) as temporary:
        temporary.write_text(json.dumps(identity))


def read_run(folder: Path, identity: Mapping[str, Any]) -> StoredRun | None:
    """A finished run of this very command line, made of the same; None where there is none."""
    done, surroundings = folder / DONE, folder / SURROUNDINGS
    if not (done.is_file() and surroundings.is_file()) or json.loads(done.read_text()) != identity:
        return None
    steps = [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]
    use = [UseSample(row[0], row[1], tuple(row[2:])) for row in json.loads((folder / USE).read_text())]
    return StoredRun(steps, use, json.loads(surroundings.read_text()))


def write_report(
    out: Path,
    comparison: Comparison,
    raw: Mapping[tuple[str, int, int], Sequence[Step]],
    manifest: Mapping[str, Any],
) -> None:
    """The report, as text and as a page, and the data; `raw` has what each run logged, by arm, seed and round."""
    from seamless_verl.tools.compare.page import markdown, page  # plotly, of which the command says if it is missing

    texts = {"report.md": markdown(comparison), "report.html": page(comparison)}
    texts["manifest.json"] = json.dumps(manifest, indent=1, default=str) + "\n"
    for name, text in texts.items():
        with replaced_file(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    write_table(out / "runs.parquet", run_rows(comparison))
    write_table(out / "steps.parquet", step_rows(comparison.runs, raw))
    write_table(out / "lengths.parquet", length_rows(comparison.runs))


def named(run: Run) -> dict[str, Any]:
    """The columns by which a table's rows are told apart."""
    return {"arm": run.arm, "seed": run.seed, "round": run.round}


def run_rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """A row for each run: its figures, what its arm permits, when it reached its target, whether it fell, how its
    lengths differ. Null is what is not known."""
    goals, times = targets(comparison), {one.arm: one.reached for one in times_to_target(comparison)}
    for run in comparison.runs:
        facts = comparison.arms.get(run.arm, ArmFacts(""))
        reached = times.get(run.arm, {}).get(run.pair)
        points = reward_points(run.steps) if run.figures is not None else []
        yield {
            **named(run),
            "state": str(run.state),
            "reason": run.reason,
            "machine": machine_words(run.machine) if run.machine else None,
            "permitted": facts.permitted,
            "learning_rate": float(facts.rate) if facts.rate else None,
            **({} if run.figures is None else asdict(run.figures)),
            "target_reward": goals.get(run.pair),
            "seconds_to_target": None if reached is None else reached.seconds,
            "training_s_to_target": None if reached is None else reached.training_s,
            "samples_to_target": None if reached is None else reached.samples,
            "best_reward": max((point.reward for point in points), default=None),
            "collapsed": collapse(points) is not None if points else None,
            **({} if run.bias is None else {f"length_{name}": value for name, value in asdict(run.bias).items()}),
        }


def length_rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row for each sample whose length its run wrote down."""
    for run in runs:
        yield from (named(run) | row for row in (sample_rows(run.lengths) if run.lengths is not None else ()))


def step_rows(runs: Sequence[Run], raw: Mapping[tuple[str, int, int], Sequence[Step]]) -> Iterator[dict[str, Any]]:
    """A row for each step of each run: its figures, then every metric that is a number, by its name in verl."""
    for run in runs:
        for step, row in zip(run.steps, raw.get(run.key, ()), strict=run.key in raw):
            metrics = {name: value for name in row["data"] if (value := number(row["data"], name)) is not None}
            yield named(run) | asdict(step) | metrics


def write_table(file: Path, given: Iterable[Mapping[str, Any]]) -> None:
    """Rows of one table, with null where a row has no such column."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = list(given)
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    with replaced_file(file) as temporary:
        parquet.write_table(table, temporary)
