"""Says in one sentence why a session has nothing to train."""

from __future__ import annotations

from collections import Counter

from seamless_verl.trajectory.sequences import SequenceLimits, split_into_chains
from seamless_verl.trajectory.tree import Tree


def why_untrained(tree: Tree, limits: SequenceLimits, keys: str = "max_sequence") -> str:
    """The reason, for a tree of which `assemble` makes no sequence. `keys` names the settings of the limit."""
    if not tree.turns:
        return "no call of its agent was answered"
    if not tree.generated:
        return f"its {len(tree.turns)} calls generated no token"
    parts = split_into_chains(tree)
    if parts.chains and limits.max_sequence is not None:
        shortest = min(chain.prompt_length for chain in parts.chains)
        if shortest >= limits.max_sequence:
            return (
                f"its prompt of {shortest} tokens leaves no room for a response in the {limits.max_sequence} tokens "
                f"of a training sequence ({keys}). Raise that, or shorten the prompt"
            )
    if parts.chains:
        return (
            "a grammar (JSON schema, required or strict tool) was in force for all its tokens, and "
            "seamless.tokens.grammar trains none of them. Set seamless.tokens.grammar=train_all to train them"
        )
    reasons = Counter(str(reason) for _, reason in parts.dropped)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"none of its {len(tree.turns)} calls finished ({counts})"
