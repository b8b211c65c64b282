#!/usr/bin/env bash
# Compare HGPO with plain GRPO at equal tokens, three seeds each.
# Further arguments are those of `seamless-verl compare`, such as --steps 15 --seeds 1,2, or overrides of every arm.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/../../.venv/bin/python"
PYTHON="${PYTHON:-$([ -x "$VENV" ] && echo "$VENV" || echo python)}"

ARMS=(grpo:seamless.sampler.name=null:algorithm.adv_estimator=grpo
  hgpo:seamless.sampler.name=null:algorithm.adv_estimator=hgpo)
exec "$PYTHON" -m seamless_verl.cli compare "$HERE" actor_rollout_ref.rollout.val_kwargs.n=2 --equal-tokens \
  --validate 4 --steps 12 --seeds 1,2,3 --arms "$(IFS=, && echo "${ARMS[*]}")" "$@"
