"""The ledger against a count second by second, whatever the order in which reports arrive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support.ledger import Clock, make_activity, make_ledger

from seamless_verl.resources.ledger.activity import BUSY, ActivityReport, DeviceUse
from seamless_verl.resources.ledger.ledger import Ledger, LedgerReport

DEVICES = ("d0", "d1")
HORIZON = 40
SOURCES = ("worker", "engine", "manager")
Cell = tuple[str, int, DeviceUse]  # device, second, kind
Action = tuple[
    str, int, str, DeviceUse, tuple[str, ...]
]  # source, second, what it does, of which kind, on which devices

SPAN = st.tuples(
    st.sampled_from(SOURCES),
    st.integers(0, HORIZON - 1),
    st.integers(1, 15),
    st.sampled_from(BUSY),
    st.sampled_from([("d0",), ("d0",), ("d1",), DEVICES]),
)
TAKE = st.tuples(st.sampled_from(SOURCES), st.integers(1, HORIZON))
CLOSES = st.lists(st.integers(1, HORIZON - 1), min_size=1, max_size=4)


@st.composite
def scripts(draw: st.DrawFn) -> list[Action]:
    """Spans of work; a source may end before it has reported all of it."""
    actions: list[Action] = []
    for source, start, length, kind, devices in draw(st.lists(SPAN, min_size=4, max_size=14)):
        actions += [(source, start, "begin", kind, devices), (source, start + length, "end", kind, devices)]
    for source, at in [*draw(st.lists(TAKE, max_size=8)), *((source, HORIZON - n) for n, source in enumerate(SOURCES))]:
        actions.append((source, at, "take", DeviceUse.TRAIN, DEVICES))
    return sorted((a for a in actions if a[1] <= HORIZON), key=lambda a: a[1])


@dataclass
class Model:
    """The sources' reports, and what each device really did in each second."""

    reports: list[ActivityReport]
    done: set[Cell]


def run_script(script: list[Action]) -> Model:
    """Runs the script on real activities, and counts it second by second; what follows a last take is not reported."""
    reports: list[ActivityReport] = []
    done: set[Cell] = set()
    for source in SOURCES:
        clock = Clock()
        activity = make_activity(clock, *DEVICES, source=source)
        counts: Counter[tuple[str, DeviceUse]] = Counter()
        unreported: set[Cell] = set()
        last_take = -1

        def active(counts: Counter[tuple[str, DeviceUse]] = counts) -> list[tuple[str, DeviceUse]]:
            return [key for key, count in counts.items() if count]

        at_take: list[tuple[str, DeviceUse]] = []
        for _, now, do, kind, devices in (a for a in script if a[0] == source):
            unreported |= {(device, second, k) for device, k in active() for second in range(int(clock.now), now)}
            clock.now = now
            keys = [(device, kind) for device in devices]
            if do == "take":
                if now > last_take:
                    reports.append(activity.take())
                    done, unreported, last_take, at_take = done | unreported, set(), now, active()
                continue
            getattr(activity, do)(kind, devices)
            counts.update(dict.fromkeys(keys, 1 if do == "begin" else -1))
        done |= {(device, second, kind) for device, kind in at_take for second in range(last_take, HORIZON)}
    return Model(reports, done)


def counted(done: set[Cell]) -> tuple[dict[str, dict[DeviceUse, float]], Counter[tuple[DeviceUse, DeviceUse]]]:
    """Seconds by device and kind, and what was hidden under what."""
    table = {device: dict.fromkeys(DeviceUse, 0.0) for device in DEVICES}
    hidden: Counter[tuple[DeviceUse, DeviceUse]] = Counter()
    for device in DEVICES:
        for second in range(HORIZON):
            kinds = [kind for kind in BUSY if (device, second, kind) in done]
            table[device][kinds[0] if kinds else DeviceUse.IDLE] += 1
            hidden.update((kinds[0], under) for under in kinds[1:])
    return table, hidden


def closed_over(reports: list[LedgerReport]) -> dict[str, dict[DeviceUse, float]]:
    """What all reports say together."""
    parts = [table for report in reports for table in (report.seconds, report.amended)]
    return {device: {kind: sum(part[device][kind] for part in parts) for kind in DeviceUse} for device in DEVICES}


def checked(ledger: Ledger, report: LedgerReport) -> LedgerReport:
    ledger.check_integrity()
    report.check_integrity()
    assert all(sum(kinds.values()) == report.wall for kinds in report.seconds.values())
    assert all(sum(kinds.values()) == 0 for kinds in report.amended.values())
    return report


@settings(max_examples=150, deadline=None)
@given(script=scripts(), closes=CLOSES, data=st.data())
def test_the_ledger_adds_up_and_loses_nothing(script: list[Action], closes: list[int], data: st.DataObject) -> None:
    model = run_script(script)
    batches = data.draw(st.permutations(model.reports))
    when = [data.draw(st.integers(0, len(closes))) for _ in batches]  # before which close each arrives
    ledger, reports = make_ledger(len(DEVICES)), []
    for number, until in enumerate([*sorted(closes), HORIZON]):
        for batch in (b for b, n in zip(batches, when, strict=True) if n == number):
            ledger.add(batch)
        reports.append(checked(ledger, ledger.close(until)))
    table, hidden = counted(model.done)
    assert ledger.seconds == table
    assert closed_over(reports) == table
    assert {pair: seconds for pair, seconds in ledger.hidden.items() if seconds} == hidden
    for pair in ledger.hidden:
        assert sum(report.hidden[pair] for report in reports) == hidden[pair]
    assert sum(report.too_late for report in reports) == 0


@settings(max_examples=60, deadline=None)
@given(
    script=scripts(),
    closes=CLOSES,
    keep=st.integers(0, 10),
    max_intervals=st.integers(1, 3),
    data=st.data(),
)
def test_it_adds_up_also_when_little_is_kept(
    script: list[Action],
    closes: list[int],
    keep: int,
    max_intervals: int,
    data: st.DataObject,
) -> None:
    model = run_script(script)
    batches = data.draw(st.permutations(model.reports))
    when = [data.draw(st.integers(0, len(closes))) for _ in batches]
    ledger, reports = make_ledger(len(DEVICES), keep_s=keep, max_intervals=max_intervals), []
    for number, until in enumerate([*sorted(closes), HORIZON]):
        for batch in (b for b, n in zip(batches, when, strict=True) if n == number):
            ledger.add(batch)
        reports.append(checked(ledger, ledger.close(until)))
    assert closed_over(reports) == ledger.seconds
