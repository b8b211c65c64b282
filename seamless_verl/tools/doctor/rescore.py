"""Scores a run's recorded tokens again by the checkpoints whose weights generated them: `seamless-verl doctor RUN`.

A checkpoint counts if it has the model's own files. Each call is scored alone, by transformers in float32, and what
differs is named by its form as in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from seamless_verl.errors import ConfigError
from seamless_verl.journal import JournalReader, StoredCall, StoredSession
from seamless_verl.trajectory.elimination import OF_RECORD, Form, form_of

JOURNALS, CHECKPOINTS, MODEL = "trajectories*.sqlite", "global_step_*", "actor/huggingface"
USUAL = 0.1  # nats, of the mean |difference|: no precision makes more
UNKNOWN = "in no form that is known: look at its weights, at KV kept from older ones, and at how the model is computed"


class ScoredCall(NamedTuple):
    session: str
    call: str
    temperature: float
    ids: list[int]  # of the prompt, and all that was generated
    places: NDArray[np.int64]  # in `ids`, of the tokens of the version
    recorded: NDArray[np.float32]  # of these


def rescore(run: Path, calls: int) -> tuple[list[str], bool]:
    """Lines about at most so many calls of each version, the newest first; whether any is not usual."""
    folders = {int(one.name.rpartition("_")[2]): one / MODEL for one in run.glob(CHECKPOINTS)}
    models = {version: folder for version, folder in folders.items() if any(folder.glob("*.safetensors"))}
    journals = sorted(run.glob(JOURNALS))
    if not models or not journals:
        lacking = f"{CHECKPOINTS}/{MODEL}/*.safetensors" if journals else JOURNALS
        way_out = (
            "Give trainer.default_local_dir of a run with the gateway, whose checkpoint.save_contents has hf_model"
        )
        raise ConfigError("RUN", str(run), f"has no {lacking}", way_out)
    lines, differs = list[str](), False
    for version, folder in sorted(models.items()):
        found = list(islice(calls_of(journals, version), calls))
        if not found:
            lines.append(f"version {version}: no call on record has tokens of it")
            continue
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        judged = [judge(model, one) for one in found]
        tokens = np.concatenate([difference for difference, _ in judged])
        remarks = [text for _, text in judged if text]
        lines.append(
            f"version {version}: {len(found)} calls, {len(tokens)} tokens: {tokens.mean():.4f} nats on the mean,"
            f" {tokens.max():.2f} at most; {len(remarks)} calls above {USUAL}"
        )
        lines += [f"  {text}" for text in remarks]
        differs |= bool(remarks)
    return lines, differs


def calls_of(journals: Sequence[Path], version: int) -> Iterator[ScoredCall]:
    """The calls with tokens of a version, the newest session first."""
    for reader in map(JournalReader, journals):
        for summary in reversed(reader.sessions()):
            oldest, newest = summary.oldest, summary.newest
            held = oldest is not None and newest is not None and oldest <= version <= newest
            session = reader.read(summary.session_id) if held else None
            if session is not None and not session.images:
                yield from (found for call in session.calls if (found := recorded_of(session, call, version)))


def recorded_of(session: StoredSession, call: StoredCall, version: int) -> ScoredCall | None:
    """A call's tokens of a version, None if it has none."""
    ids, places, recorded = list(call.prompt_ids), list[int](), list[float]()
    for segment in call.segments:
        if segment.version == version:
            places += range(len(ids), len(ids) + len(segment))
            recorded += segment.logprobs
        ids += segment.ids
    if not places:
        return None
    temperature = float(session.settings.get("temperature") or 1.0)
    where, logprobs = np.array(places), np.array(recorded, np.float32)
    return ScoredCall(session.session_id, call.call_id, temperature, ids, where, logprobs)


def judge(model: Any, call: ScoredCall) -> tuple[NDArray[np.float32], str]:
    """The |differences| of a call's tokens, and what is at fault where they are not usual."""
    with torch.inference_mode():
        logits = model(torch.tensor([call.ids])).logits[0, call.places - 1].float()
    chosen = torch.tensor(call.ids)[call.places]

    def read(times: float) -> NDArray[np.float32]:
        logprobs = (logits / (call.temperature * times)).log_softmax(-1)
        found: NDArray[np.float32] = logprobs.gather(-1, chosen[:, None])[:, 0].numpy()
        return found

    other = read(1.0)
    difference = np.abs(call.recorded - other)
    if (mean := float(difference.mean())) <= USUAL:
        return difference, ""
    form = form_of(call.recorded, other, USUAL, read)
    cause = UNKNOWN if form.form is Form.ALL else OF_RECORD[form.form].format(form.number)
    return difference, f"session {call.session}, call {call.call}: {mean:.2f} nats on the mean. Likely {cause}"
