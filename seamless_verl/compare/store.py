"""The files of a comparison: the report, the raw data as parquet, and the manifest with which it is run again.

    OUT/report.md report.html manifest.json runs.parquet steps.parquet
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

from seamless_verl.compare.device_use import UseSample
from seamless_verl.compare.figures import number
from seamless_verl.compare.outcome import Run
from seamless_verl.compare.report import Comparison, markdown
from seamless_verl.compare.running import Step
from seamless_verl.tiny.files import replaced_file, writing_to

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
    from seamless_verl.compare.page import page

    with replaced_file(out / "report.md") as temporary:
        temporary.write_text(markdown(comparison), encoding="utf-8")
    with replaced_file(out / "report.html") as temporary:
        temporary.write_text(page(comparison), encoding="utf-8")
    write_table(out / "runs.parquet", [run_row(run) for run in comparison.runs])
    write_table(out / "steps.parquet", list(step_rows(comparison.runs, raw)))


def run_row(run: Run) -> dict[str, Any]:
    figures = {} if run.figures is None else asdict(run.figures)
    named = {"arm": run.arm, "seed": run.seed, "round": run.round, "state": str(run.state), "reason": run.reason}
    return named | figures


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
    table = pa.table({name: column([row.get(name) for row in rows]) for name in names})
    with replaced_file(file) as temporary:
        parquet.write_table(table, temporary)


def column(values: Sequence[Any]) -> list[Any]:
    """Values of one type: whole numbers beside others become floats."""
    numbers = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)
    mixed = numbers and any(isinstance(value, float) for value in values)
    return [None if value is None else float(value) for value in values] if mixed else list(values)


def write_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    with replaced_file(out / "manifest.json") as temporary:
        temporary.write_text(json.dumps(manifest, indent=1, default=str) + "\n")
