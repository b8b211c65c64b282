"""The orders of tasks beside plain lists of them, and runners that wait and leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.data_plane.task_order import Deadlines, TaskQueue
from seamless_verl.data_plane.task_polls import TaskPolls

AGENTS = ("a", "b", "c")


@dataclass(eq=False)
class Thing:
    deadline: float | None = None
    alarm: int = 0


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 20)), st.booleans())))
def test_the_earliest_deadline_is_known_whatever_changes(changes: list[tuple[int, int | None, bool]]) -> None:
    things, deadlines = [Thing() for _ in range(6)], Deadlines()
    for number, deadline, put_off in changes:
        thing = things[number]
        if put_off and thing.deadline is not None:
            thing.deadline += deadline or 0
        else:
            thing.deadline = None if deadline is None else float(deadline)
            deadlines.set(thing)
        expected = min((one.deadline for one in things if one.deadline is not None), default=None)
        found = deadlines.next()
        assert (None if found is None else found[0]) == expected
        assert found is None or found[1].deadline == expected


TASKS = st.lists(st.tuples(st.sampled_from(AGENTS), st.integers(0, 30)), max_size=20)


@given(TASKS, st.lists(st.tuples(st.sets(st.sampled_from(AGENTS)), st.booleans())), st.sets(st.integers(0, 19)))
def test_the_first_that_fits_is_found(
    tasks: list[tuple[str, int]], requests: list[tuple[set[str], bool]], unready: set[int]
) -> None:
    queue, queued = TaskQueue(), {f"t{n}": (place, agent) for n, (agent, place) in enumerate(tasks)}
    held = {f"t{number}" for number in unready}
    for name, (place, agent) in queued.items():
        queue.push(agent, place, name)
    for agents, takes in requests:
        ready = {name: entry for name, entry in queued.items() if name not in held and entry[1] in agents}
        expected = min(ready, key=lambda name: (ready[name][0], name), default=None)
        found = queue.first(agents, queued.__contains__, lambda name: name not in held)
        assert found == expected or (found is not None and ready[found][0] == ready[expected or ""][0])
        if takes and found is not None:
            del queued[found]
        else:
            held.clear()  # from now on all are ready


async def test_a_task_wakes_one_that_can_take_it_and_another_if_that_one_leaves() -> None:
    polls, woken = TaskPolls(), list[str]()

    async def poll(name: str, agents: set[str]) -> None:
        await polls.wait(agents)
        woken.append(name)

    tasks = [asyncio.create_task(poll(name, agents)) for name, agents in (("1", {"b"}), ("2", {"a"}), ("3", {"a"}))]
    await asyncio.sleep(0)
    polls.offer("a")
    tasks[1].cancel()  # it was woken, and has not run yet
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait([tasks[2]])
    assert woken == ["3"] and len(polls) == 1
    polls.offer("c")
    assert len(polls) == 1
    polls.wake_all()
    await tasks[0]
    assert woken == ["3", "1"] and len(polls) == 0
