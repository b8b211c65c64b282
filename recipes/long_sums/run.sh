#!/usr/bin/env bash
# Make the model and the data in $DATA, then train with $PYTHON (.venv of the checkout, or python).
# Further arguments are hydra overrides:
#   recipes/long_sums/run.sh trainer.v1.trainer_mode=sync
#   MAIN=verl.trainer.main_ppo recipes/long_sums/run.sh trainer.v1.trainer_mode=sync platform=cpu
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
MAIN="${MAIN:-seamless_verl.main_ppo}"
export DATA="${DATA:-$PWD/runs/$(basename "$HERE")}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

ARGUMENTS=(--config-dir "$HERE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir='$DATA/outputs'"
  "reward.custom_reward_function.path='$HERE/reward.py'"
  "trainer.default_local_dir='\${oc.env:DATA}/checkpoints/\${trainer.experiment_name}'" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$PYTHON" "$HERE/data.py" --out "$DATA"
exec "$PYTHON" -m "$MAIN" "${ARGUMENTS[@]}"
