"""Workers that train get what they compute with, and what may be a user's own."""

from __future__ import annotations

from seamless_verl.trainer.trained_columns import trained_columns

READ = [
    *("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "attention_mask"),
    *("old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "returns", "values", "rm_scores"),
    *("rollout_is_weights", "weight_version", "grammar", "multi_modal_inputs", "routed_experts"),
    *("teacher_ids", "teacher_logprobs", "uid", "turn", "row_weights"),
]


def test_what_is_computed_with_stays_in_its_order() -> None:
    assert trained_columns(["raw_prompt", *READ, "extra_fields", "a_users_own", "index"]) == [
        *READ,
        "a_users_own",
        "index",
    ]


def test_a_batch_that_names_no_columns_has_all() -> None:
    assert trained_columns(None) is None
