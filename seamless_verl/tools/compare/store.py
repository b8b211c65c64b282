"""The files of a comparison: the report, the raw data as parquet, and the manifest with which it is run again.

    OUT/report.md report.html manifest.json runs.parquet steps.parquet lengths.parquet
    OUT/<arm>-seed<seed>-r<round>/ log.txt logged.jsonl steps.jsonl use.json surroundings.json done

Each is replaced whole. A run whose `done` has the very command line of a run that is asked for, and the same config,
files, versions and code, is not made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seamless_verl.tiny.files import replaced_file, writing_to
from seamless_verl.tools.compare.comparison import ArmFacts, Comparison
from seamless_verl.tools.compare.device_use import UseSample
from seamless_verl.tools.compare.figures import number
from seamless_verl.tools.compare.learning import RewardPoint, collapse, reward_points, targets, times_to_target
from seamless_verl.tools.compare.lengths import sample_rows
from seamless_verl.tools.compare.machine import machine_words
from seamless_verl.tools.compare.outcome import Pair, Run
from seamless_verl.tools.compare.page import markdown, page
from seamless_verl.tools.compare.running import Step

STEPS, USE, SURROUNDINGS, DONE = "steps.jsonl", "use.json", "surroundings.json", "done"


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


def write_report(out: Path, comparison: Comparison, raw: Mapping[tuple[str, int, int], Sequence[Step]]) -> None:
    """The report, as text and as a page, and the raw data; `raw` has what each run logged, by arm, seed and round."""
    with replaced_file(out / "report.md") as temporary:
        temporary.write_text(markdown(comparison), encoding="utf-8")
    with replaced_file(out / "report.html") as temporary:
        temporary.write_text(page(comparison), encoding="utf-8")
    write_table(out / "runs.parquet", run_rows(comparison))
    write_table(out / "steps.parquet", list(step_rows(comparison.runs, raw)))
    write_table(out / "lengths.parquet", list(length_rows(comparison.runs)))


def run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """A row for each run: its figures, and what an arm permits, and when its run reached a reward."""
    goals, times = targets(comparison), {one.arm: one for one in times_to_target(comparison)}
    rows = []
    for run in comparison.runs:
        named = {"arm": run.arm, "seed": run.seed, "round": run.round, "state": str(run.state), "reason": run.reason}
        named["machine"] = machine_words(run.machine) if run.machine else None
        figures = {} if run.figures is None else asdict(run.figures)
        reached = times[run.arm].reached.get(run.pair) if run.arm in times else None
        facts = comparison.arms.get(run.arm, ArmFacts(""))
        known = {"permitted": facts.permitted, "learning_rate": float(facts.rate) if facts.rate else None}
        rows.append(named | known | figures | learning_columns(run, goals, reached))
    return rows


def learning_columns(run: Run, goals: Mapping[Pair, float], reached: RewardPoint | None) -> dict[str, Any]:
    """When the run reached its target, whether it fell, and how its lengths differ; null where that is not known."""
    points = reward_points(run.steps) if run.figures is not None else []
    bias = {} if run.bias is None else {f"length_{name}": value for name, value in asdict(run.bias).items()}
    return {
        "target_reward": goals.get(run.pair),
        "seconds_to_target": None if reached is None else reached.seconds,
        "training_s_to_target": None if reached is None else reached.training_s,
        "samples_to_target": None if reached is None else reached.samples,
        "best_reward": max((point.reward for point in points), default=None),
        "collapsed": collapse(points) is not None if points else None,
        **bias,
    }


def length_rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row for each sample whose length its run wrote down."""
    for run in runs:
        for row in sample_rows(run.lengths) if run.lengths is not None else ():
            yield {"arm": run.arm, "seed": run.seed, "round": run.round, **row}


def step_rows(runs: Sequence[Run], raw: Mapping[tuple[str, int, int], Sequence[Step]]) -> Iterator[dict[str, Any]]:
    """A row for each step of each run: its figures, then every metric that is a number, by its name in verl."""
    for run in runs:
        logged = raw.get((run.arm, run.seed, run.round), ())
        for step, row in zip(run.steps, logged, strict=True) if logged else ():
            metrics = {name: value for name in row["data"] if (value := number(row["data"], name)) is not None}
            yield {"arm": run.arm, "seed": run.seed, "round": run.round, **asdict(step), **metrics}


def write_table(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of one table, with null where a row has no such column."""
    import pyarrow as pa
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    with replaced_file(file) as temporary:
        parquet.write_table(table, temporary)


def write_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    with replaced_file(out / "manifest.json") as temporary:
        temporary.write_text(json.dumps(manifest, indent=1, default=str) + "\n")
