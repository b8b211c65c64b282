#!/usr/bin/env bash
# Make the model and the data of recipes/long_sums in $DATA, then train with $PYTHON (.venv of the checkout, or python).
# Further arguments are hydra overrides:
#   recipes/hard_prompts/run.sh seamless.sampler.schedule=hardness seamless.sampler.most=64
#   recipes/hard_prompts/run.sh seamless.sampler.name=gdro
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SUMS="$HERE/../long_sums"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"
export DATA="${DATA:-$PWD/runs/$(basename "$HERE")}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

ARGUMENTS=(--config-dir "$HERE" --config-name config
  "hydra.searchpath=[pkg://seamless_verl.config]" "hydra.run.dir=$DATA/outputs"
  "reward.custom_reward_function.path=$SUMS/reward.py"
  "trainer.default_local_dir=$DATA/checkpoints/\${trainer.experiment_name}" "$@")

"$PYTHON" -m seamless_verl.check --unmade "${ARGUMENTS[@]}" # refuse a setting that cannot work before anything else
"$PYTHON" "$SUMS/data.py" --out "$DATA"
exec "$PYTHON" -m seamless_verl.main_ppo "${ARGUMENTS[@]}"
