#!/usr/bin/env bash
# Compare samplers and estimators with plain GRPO at equal tokens, three seeds each; the report says where it is.
# Few questions, that come again and again, and validations on them: so much is learned of them in so few steps.
# DARS makes fewer steps, since each of its own generates three times as much, or five times; it is validated more often.
# --steps and --validate are the others'. No arm is compared beyond the tokens of the run that generated the fewest.
# Further arguments are those of `seamless-verl compare`, such as --seeds 1,2, or overrides of every arm.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export QUESTIONS="${QUESTIONS:-96}"
ALONE=seamless.sampler.name=null

ARMS=(
  "grpo:$ALONE"
  dars:seamless.sampler.name=dars:trainer.total_training_steps=12:trainer.test_freq=4
  dars_hardness:seamless.sampler.name=dars_hardness:trainer.total_training_steps=8:trainer.test_freq=2
  gdro:seamless.sampler.name=gdro
  xrpo:seamless.sampler.name=xrpo
  "mc_grpo:$ALONE:algorithm.adv_estimator=mc_grpo:actor_rollout_ref.rollout.n=9"
  "novelty:$ALONE:algorithm.adv_estimator=grpo_novelty"
)
exec "$PYTHON" -m seamless_verl.cli compare "$HERE" actor_rollout_ref.rollout.val_kwargs.n=6 \
  "data.val_files=\${oc.env:DATA}/train.parquet" --equal-tokens --validate 12 --steps 36 --seeds 1,2,3 --arms "$(IFS=, && echo "${ARMS[*]}")" "$@"
