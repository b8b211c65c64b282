"""From who waits for whom to who is to blame.

Only items that stand still, and that an overdue one waits for through others that stand still, are looked at. One
that waits for no such item is a culprit. What waits for a culprit, through however many, is explained by it. What
is left waits in rings; each ring is a deadlock, and explains what waits for its members.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from seamless_verl.resources.watchdog.findings import Finding, Verdict

if TYPE_CHECKING:
    from seamless_verl.resources.watchdog.marks import Item, Key

Waits = dict["Key", list["Key"]]  # an item: the items that stand still among those it waits for
Rings = Mapping["Key", "tuple[Key, ...]"]  # a member of a ring: the ring as seen from it


def explain(items: Mapping[Key, Item], now: float) -> list[Finding]:
    """The findings: culprits by how many they hold up, the longest still first among equals, each before those."""
    behind = _behind(items)
    waits = _concerned(items, behind, now)
    rings = _rings(_without_culprits(waits))
    culprits, depths = _culprits(waits, {key: _worst(ring, items) for key, ring in rings.items()})
    holds = Counter(culprits.values())

    def order(key: Key) -> tuple[float, float, Key, bool, int, float, Key]:
        culprit = culprits[key]
        return (-holds[culprit], items[culprit].last, culprit, key != culprit, depths[key], items[key].last, key)

    def finding(key: Key) -> Finding:
        item, ring = items[key], rings.get(key, ())
        verdict = Verdict.DEADLOCK if ring else _verdict(item, culprits[key] == key, bool(behind[key]))
        overdue = now - min(item.due, item.deadline)
        return Finding(*key, verdict, item.began, item.last, now, overdue, item.waits_on, culprits[key], ring)

    return [finding(key) for key in sorted(waits, key=order)]


def _behind(items: Mapping[Key, Item]) -> Waits:
    """All that is there of what each item waits for: by its own word, or because somebody holds that or itself."""
    holders: Waits = {}
    for key, item in items.items():
        for held in item.holds:
            holders.setdefault(held, []).append(key)
    behind: Waits = {}
    for key, item in items.items():
        others = [holder for on in (*item.waits_on, key) for holder in holders.get(on, ()) if holder != key]
        behind[key] = list(dict.fromkeys(other for other in (*item.waits_on, *others) if other in items))
    return behind


def _concerned(items: Mapping[Key, Item], behind: Waits, now: float) -> Waits:
    """The overdue items, and what stands still behind them."""
    waits: Waits = {}
    queue = deque(key for key, item in items.items() if item.overdue(now))
    while queue:
        key = queue.popleft()
        if key not in waits:
            waits[key] = [other for other in behind[key] if items[other].still(now)]
            queue.extend(waits[key])
    return waits


def _worst(ring: tuple[Key, ...], items: Mapping[Key, Item]) -> Key:
    """The member that was due first stands for its ring."""
    return min(ring, key=lambda key: (min(items[key].due, items[key].deadline), key))


def _without_culprits(waits: Waits) -> Waits:
    """What is left when those that wait for nobody are taken away, again and again: rings, and who waits for them."""
    left = {key: set(on) for key, on in waits.items()}
    waiters = _reversed(waits)
    queue = deque(key for key, on in left.items() if not on)
    while queue:
        key = queue.popleft()
        del left[key]
        for waiter in waiters[key]:
            left[waiter].discard(key)
            if not left[waiter]:
                queue.append(waiter)
    return {key: [other for other in waits[key] if other in left] for key in left}


def _rings(left: Waits) -> Rings:
    """Everybody here waits for somebody here: walk until one returns."""
    rings: dict[Key, tuple[Key, ...]] = {}
    walked: set[Key] = set()
    for start in left:
        path: dict[Key, None] = {}
        key = start
        while key not in walked:
            walked.add(key)
            path[key] = None
            key = left[key][0]
        if key in path:
            ring = list(path)[list(path).index(key) :]
            rings |= {member: (*ring[i:], *ring[:i]) for i, member in enumerate(ring)}
    return rings


def _culprits(waits: Waits, worst: Mapping[Key, Key]) -> tuple[dict[Key, Key], dict[Key, int]]:
    """Each item's nearest culprit, and through how many it waits for it; `worst` stands for each member of a ring."""
    sources = [key for key, on in waits.items() if not on or key in worst]
    culprits = {key: worst.get(key, key) for key in sources}
    depths = dict.fromkeys(sources, 0)
    waiters = _reversed(waits)
    queue = deque(sources)
    while queue:
        key = queue.popleft()
        for waiter in waiters[key]:
            if waiter not in culprits:
                culprits[waiter], depths[waiter] = culprits[key], depths[key] + 1
                queue.append(waiter)
    return culprits, depths


def _reversed(waits: Waits) -> Waits:
    waiters: Waits = {key: [] for key in waits}
    for key, on in waits.items():
        for other in on:
            waiters[other].append(key)
    return waiters


def _verdict(item: Item, culprit: bool, behind: bool) -> Verdict:
    if not culprit:
        return Verdict.HELD_UP
    if item.waits_on and not behind:
        return Verdict.NOT_WOKEN
    return Verdict.SLOW if behind and item.last <= item.declared else Verdict.STUCK
