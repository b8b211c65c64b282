#!/usr/bin/env bash
# Make the model and the data in $DATA, then train with $PYTHON (.venv of the checkout, or python).
# Further arguments are hydra overrides. QUESTIONS is the number of prompts, all of which are an epoch.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
HARD="$HERE/../hard_prompts" SUMS="$HERE/../arithmetic_grpo" # their settings; the data of the first, the reward of the second
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export DATA="${DATA:-$PWD/runs/$(basename "$HERE")}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

ARGUMENTS=(--config-dir "$HERE" --config-name replay_history
  "hydra.searchpath=[pkg://seamless_verl.config,'file://$HARD','file://$SUMS']" "hydra.run.dir='$DATA/outputs'"
  "reward.custom_reward_function.path='$SUMS/reward.py'"
  "trainer.default_local_dir='\${oc.env:DATA}/checkpoints/\${trainer.experiment_name}'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$PYTHON" "$HARD/data.py" --out "$DATA" --steps "${WARM_STEPS:-300}" --train "${QUESTIONS:-192}"
exec "$PYTHON" -m "${MAIN:-seamless_verl.main_ppo}" "${ARGUMENTS[@]}"
