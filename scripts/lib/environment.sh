# Sourced by the scripts: makes an environment from a lock file, once. Afterwards $PYTHON runs everything.
# A second call finds a stamp for the same lock file and setup, and installs nothing.
# $SEAMLESS_STACK chooses the lock file: cpu (the default, in .venv), or pinned (in .venv-pinned), which has the
# versions of torch and vLLM that verl's own extras pin, torch in its CUDA build and vLLM with CPU kernels.
# Where torch's CPU build is not to be had, pinned takes the place of the default, and .venv is a link to it.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
UV=uv==0.13.8
export PIP_DISABLE_PIP_VERSION_CHECK=1
use_stack() { # stack, and the one to take where its torch is not to be had
  STACK="$1" OTHERWISE="${2:-}"
  LOCK="$ROOT/requirements/$STACK.lock"
  VENV="$ROOT/.venv"
  [ "$STACK" = cpu ] || VENV="$VENV-$STACK"
  PYTHON="$VENV/bin/python"
  [ -e "$LOCK" ] || { echo "stack $STACK: there is no requirements/$STACK.lock. Use cpu, pinned or oldest." >&2; exit 2; }
  export SEAMLESS_STACK="$STACK"
}
has_link() { [ "$(readlink "$ROOT/.venv")" = .venv-pinned ]; }
if [ -n "${SEAMLESS_STACK:-}" ]; then
  use_stack "$SEAMLESS_STACK"
elif has_link; then
  use_stack pinned
else
  use_stack cpu pinned
fi

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

die() { printf '%s\n' "$*" >&2; exit 2; }

# Prints the command of a Python 3.11 that can make environments. Where there is none, uv fetches one into .venv-uv.
find_python() {
  local candidate uv
  for candidate in "${SEAMLESS_PYTHON:-}" python3.11 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  say "No Python 3.11 was found: uv fetches one into .venv-uv"
  export UV_PYTHON_INSTALL_DIR="$ROOT/.venv-uv/python" UV_PYTHON_INSTALL_BIN=0
  uv="$(command -v uv)" || {
    uv="$ROOT/.venv-uv/bin/uv"
    [ -x "$uv" ] || { python3 -m venv "$ROOT/.venv-uv" && "$ROOT/.venv-uv/bin/python" -m pip install --quiet "$UV"; }
  } >&2
  "$uv" python install --quiet 3.11 && "$uv" python find --managed-python 3.11 || die \
    "SEAMLESS_PYTHON=${SEAMLESS_PYTHON:-}: the lock file is for Python 3.11. None was found with its module ensurepip (on Debian and Ubuntu: python3.11-venv), and uv could not fetch one. Install it, or set SEAMLESS_PYTHON to its command."
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

# torch's CPU build is not on PyPI. uv finds it faster than pip, and knows PyTorch's index; pip reads all of its settings.
install_torch() {
  local torch uv=("$VENV/bin/uv" pip install --quiet --python "$PYTHON" --no-deps)
  torch="$(grep '^torch==.*+cpu$' "$LOCK")" || return 0
  {
    "${uv[@]}" "$torch" || "$PYTHON" -m pip install --quiet --no-deps "$torch" || "${uv[@]}" --torch-backend cpu "$torch"
  } >"$TMPDIR/torch.log" 2>&1
}

# uv installs the same lock in a tenth of pip's time; where it cannot, pip does.
install_lock() {
  "$VENV/bin/uv" pip install --quiet --python "$PYTHON" --no-deps -r "$LOCK" && return
  say "uv failed; installing with pip"
  "$PYTHON" -m pip install --quiet --no-deps -r "$LOCK" || die "${LOCK#"$ROOT/"}: could not be installed."
}

# Where uv looks for packages, which does not read pip's settings, and where it keeps them when HOME cannot be written.
set_uv() {
  local cache="${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/}/.cache}/uv}"
  export UV_LINK_MODE="${UV_LINK_MODE:-copy}" UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
  UV_INDEX_URL="${UV_INDEX_URL:-${PIP_INDEX_URL:-$("$PYTHON" -m pip config get global.index-url 2>/dev/null)}}" || true
  export UV_INDEX_URL
  { mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null || export UV_CACHE_DIR="$TMPDIR/uv"
}

ensure_environment() {
  local stamp base
  stamp="$VENV/.seamless-$(stamp_of)"
  [ -e "$stamp" ] && return
  check_machine
  # pip and uv end it with other codes, after which the next step would begin
  trap 'rm -rf "$VENV/tmp"; exit 130' INT
  say "[1/4] Python environment in ${VENV#"$ROOT/"}"
  if [ "$STACK" = cpu ] && has_link; then rm "$VENV"; fi
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    base="$(find_python)" || exit
    [ -e "$VENV" ] || { mkdir "$VENV" && touch "$VENV/.made-by-scripts"; }
    "$base" -m venv "$VENV"
  fi
  local -x TMPDIR="$VENV/tmp" # of which nothing is left
  mkdir -p "$TMPDIR"
  set_uv
  "$PYTHON" -m pip install --quiet "$UV" || say "uv could not be installed"
  if ! install_torch; then
    # Not where nothing at all could be fetched, and not in place of a complete environment or one of the user's.
    [ -n "$OTHERWISE" ] && [ -x "$VENV/bin/uv" ] && [ -e "$VENV/.made-by-scripts" ] &&
      ! compgen -G "$VENV/.seamless-*" >/dev/null || die "$(cat "$TMPDIR/torch.log")
${LOCK#"$ROOT/"}: torch's CPU build was not found. Set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where it is. Without it, SEAMLESS_STACK=pinned has the versions that verl pins."
    say "torch's CPU build is at none of the places that pip and uv know here: taking the versions that verl pins instead, in .venv-$OTHERWISE (3.5 GB to fetch, 7 GB on disk, about five minutes)"
    rm -rf "$VENV"
    ln -s ".venv-$OTHERWISE" "$VENV"
    use_stack "$OTHERWISE"
    ensure_environment
    return
  fi
  say "[2/4] The stack: verl, Megatron-core, vLLM for the CPU, Ray, TransferQueue ($(wc -l <"$LOCK") packages), some minutes"
  install_lock
  say "[3/4] This package"
  "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --editable "$ROOT"
  "$PYTHON" -m seamless_verl.platform.vllm_alias
  # This torch, in its CUDA build, would have commands look for an accelerator, for which this vLLM has no kernels.
  [ "$STACK" = cpu ] || grep -q VERL_PLATFORM "$VENV/bin/activate" || echo "export VERL_PLATFORM=cpu" >>"$VENV/bin/activate"
  say "[4/4] Bytecode, one to two minutes"
  # A start-up is nearly all imports, in a dozen processes. Without bytecode they take twice as long.
  env -u PYTHONDONTWRITEBYTECODE "$PYTHON" -m compileall -q -j 2 "$VENV/lib" >/dev/null 2>&1 || true
  rm -rf "$VENV"/.seamless-* "$TMPDIR"
  touch "$stamp"
  trap - INT
}
