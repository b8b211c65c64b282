# Sourced by the scripts: makes an environment from a lock file, once. Afterwards $PYTHON runs everything.
# A second call finds a stamp for the same lock file and setup, and installs nothing.
# $SEAMLESS_STACK chooses the lock file: cpu (the default, in .venv), or pinned (in .venv-pinned), which has the
# versions of torch and vLLM that verl's own extras pin, torch in its CUDA build and vLLM with CPU kernels.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
use_stack() {
  STACK="$1"
  LOCK="$ROOT/requirements/$STACK.lock"
  VENV="$ROOT/.venv"
  [ "$STACK" = cpu ] || VENV="$VENV-$STACK"
  PYTHON="$VENV/bin/python"
  [ -e "$LOCK" ] || { echo "stack $STACK: there is no requirements/$STACK.lock. Use cpu, pinned or oldest." >&2; exit 2; }
  export SEAMLESS_STACK="$STACK"
}
use_stack "${SEAMLESS_STACK:-cpu}"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

die() { printf '%s\n' "$*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in "${SEAMLESS_PYTHON:-}" python3.11 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "SEAMLESS_PYTHON=${SEAMLESS_PYTHON:-}: the lock file is for Python 3.11 and none was found. Install it, or set SEAMLESS_PYTHON to its command."
}

# What the lock file's wheels run on, before minutes are spent on them. vLLM's wheel has kernels for AVX2 and AVX-512.
check_machine() {
  local processor="${1:-/proc/cpuinfo}"
  [ "$(uname -sm)" = "Linux x86_64" ] ||
    die "$(uname -sm): the lock file is for Linux on x86_64. docs/cpu.md says what it needs."
  grep -qw avx2 "$processor" ||
    die "$processor: the processor has no AVX2, which vLLM's kernels for the CPU need. docs/cpu.md says what else they need."
  grep -qw avx512f "$processor" ||
    say "$processor: the processor has no AVX-512. vLLM takes its kernels for AVX2."
}

stamp_of() { cat "$LOCK" "$ROOT/setup.py" "$ROOT/scripts/lib/environment.sh" | sha256sum | cut -c1-16; }

# uv installs the same lock in a tenth of pip's time; where it cannot, pip does.
install_lock() {
  export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" UV_LINK_MODE="${UV_LINK_MODE:-copy}"
  if "$PYTHON" -m pip install --quiet uv==0.13.8 &&
    "$VENV/bin/uv" pip install --quiet --python "$PYTHON" --no-deps -r "$LOCK"; then
    return
  fi
  say "uv failed; installing with pip"
  "$PYTHON" -m pip install --quiet --no-deps -r "$LOCK" || die \
    "${LOCK#"$ROOT/"}: could not be installed. If torch's CPU build was not found, set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where PyTorch's CPU builds are."
}

ensure_environment() {
  local stamp
  stamp="$VENV/.seamless-$(stamp_of)"
  [ -e "$stamp" ] && return
  check_machine
  say "[1/4] Python environment in ${VENV#"$ROOT/"}"
  [ -x "$PYTHON" ] || "$(find_python)" -m venv "$VENV"
  say "[2/4] The stack: verl, Megatron-core, vLLM for the CPU, Ray, TransferQueue ($(wc -l <"$LOCK") packages), some minutes"
  install_lock
  say "[3/4] This package"
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --editable "$ROOT"
  "$PYTHON" -m seamless_verl.platform.vllm_alias
  say "[4/4] Bytecode, one to two minutes"
  # A start-up is nearly all imports, in a dozen processes. Without bytecode they take twice as long.
  env -u PYTHONDONTWRITEBYTECODE "$PYTHON" -m compileall -q -j 2 "$VENV/lib" >/dev/null 2>&1 || true
  rm -f "$VENV"/.seamless-*
  touch "$stamp"
}
