"""Images in prompts: a turn continues another one only where their images are the same files."""

from __future__ import annotations

import numpy as np
import pytest

from seamless_verl.errors import TurnConflictError
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.images import ImageKeys, PromptImage, images_of, stored_images
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, Segment, Turn, logprobs, tokens
from seamless_verl.trajectory.sequences import NO_LIMITS, SequenceLimits, assemble, why_untrained
from seamless_verl.trajectory.session import SessionRecord

PAD = 9
RED, BLUE = "a" * 64, "b" * 64


def turn(name: str, prompt: list[int], generated: list[int], *images: PromptImage) -> Turn:
    segments = [Segment(tokens(generated), logprobs([-0.5] * len(generated)), 0, "r")]
    return Turn(name, tokens(prompt), segments, Finish.STOP, {"gateway": {"images": stored_images(images)}})


def test_the_same_image_continues_and_another_one_forks_at_its_first_placeholder() -> None:
    record = SessionRecord("p", "s")
    first = record.add_turn(turn("1", [1, PAD, PAD, 2], [5, 6], PromptImage(1, 2, RED)))
    again = [1, PAD, PAD, 2, 5, 6, 3, PAD, PAD, 4]
    second = record.add_turn(turn("2", again, [7], PromptImage(1, 2, RED), PromptImage(7, 2, RED)))
    other = record.add_turn(turn("3", again, [8], PromptImage(1, 2, BLUE), PromptImage(7, 2, RED)))
    assert second.match_end is first.end
    assert sum(map(len, other.match_end.path_from(None))) == 1
    assert list(second.prompt_ids()) == list(other.prompt_ids()) == again
    record.check_integrity()


def test_sequences_have_the_models_ids_and_the_images_in_their_order() -> None:
    record = SessionRecord("p", "s")
    record.add_turn(turn("1", [1, PAD, PAD, 2], [5, 6], PromptImage(1, 2, RED)))
    later = (PromptImage(1, 2, RED), PromptImage(7, 2, BLUE))
    record.add_turn(turn("2", [1, PAD, PAD, 2, 5, 6, 3, PAD, PAD, 4], [7], *later))
    (sequence,) = assemble(record, TrainAll(), 0).sequences
    assert sequence.prompt_ids.tolist() == [1, PAD, PAD, 2] and sequence.prompt_ids.dtype == np.int32
    assert sequence.response_ids.tolist() == [5, 6, 3, PAD, PAD, 4, 7]
    assert sequence.response_mask.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert sequence.images == (RED, BLUE)


def test_a_turn_that_is_recorded_again_has_the_same_images() -> None:
    record = SessionRecord("p", "s")
    record.add_turn(turn("1", [1, PAD], [5], PromptImage(1, 1, RED)))
    record.add_turn(turn("1", [1, PAD], [5], PromptImage(1, 1, RED)))
    with pytest.raises(TurnConflictError):
        record.add_turn(turn("1", [1, PAD], [5], PromptImage(1, 1, BLUE)))


def test_ids_without_images_are_not_copied() -> None:
    keys, ids = ImageKeys(), tokens([1, 2])
    assert keys.keyed(ids, ()) is ids and keys.restored(ids) is ids and keys.digests(ids) == ()
    assert images_of({}) == () and images_of({"gateway": {"images": [[1, 2, RED]]}}) == (PromptImage(1, 2, RED),)


@pytest.mark.parametrize(
    ("written", "sent", "kept", "dropped"),
    [
        ([5, PAD, 6], [3], [5], {DropReason.PLACEHOLDER: 4}),  # by the model
        ([5, 6], [3, PAD, 4], [5, 6], {DropReason.PLACEHOLDER: 2}),  # in a text that its agent sent
        ([PAD, 5], [3], None, {DropReason.PLACEHOLDER: 4}),
        ([5, 6], [3], [5, 6, 3, 7, 8], {}),
    ],
)
def test_what_follows_a_placeholder_without_an_image_is_not_trained(
    written: list[int], sent: list[int], kept: list[int] | None, dropped: dict[DropReason, int]
) -> None:
    record = SessionRecord("p", "s")
    image, prompt = PromptImage(1, 2, RED), [1, PAD, PAD, 2]
    record.add_turn(turn("1", prompt, written, image))
    record.add_turn(turn("2", [*prompt, *written, *sent], [7, 8], image))
    assembly = assemble(record, TrainAll(), 0)
    assert [sequence.response_ids.tolist() for sequence in assembly.sequences] == ([] if kept is None else [kept])
    assert assembly.account.dropped == dropped and assembly.account.generated == len(written) + 2


def test_a_placeholder_without_an_image_beyond_the_limit_drops_nothing_more() -> None:
    record = SessionRecord("p", "s")
    record.add_turn(turn("1", [1, PAD, PAD, 2], [5, 6, PAD], PromptImage(1, 2, RED)))
    assembly = assemble(record, TrainAll(), 0, SequenceLimits(6))
    assert assembly.account.dropped == {DropReason.TOO_LONG: 1} and assembly.account.trained == 2


def test_that_nothing_is_trained_after_such_a_prompt_is_said() -> None:
    record = SessionRecord("p", "s")
    record.add_turn(turn("1", [1, PAD, PAD, 2, PAD], [5, 6], PromptImage(1, 2, RED)))
    assert assemble(record, TrainAll(), 0).sequences == []
    assert why_untrained(record.tree, NO_LIMITS).endswith("Keep such marks out of the texts that its agent sends")
