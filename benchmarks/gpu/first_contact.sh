#!/bin/bash
# The first minutes on a real GPU, in one command of at most 560 s, without a network:
#
#     benchmarks/gpu/first_contact.sh OUT [--stand-in sm_90] [--only SECTION ...]
#
# OUT: a folder for at most eight files: first-contact.json, log.txt, the Chrome traces and the compiled kernels.
# WHEELS: a folder of wheels that wheels.sh has filled; they are installed into a temporary folder.
# With --stand-in, everything is rehearsed on a machine without a GPU, with other time limits. See docs/gpu.md.
set -uo pipefail

out=${1:?usage: first_contact.sh OUT [--stand-in TARGET] [--only SECTION ...]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
limit=560
[[ " $* " == *" --stand-in "* ]] && limit=7200

contact() {
    if [[ -n ${WHEELS:-} ]]; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" \
            "$WHEELS"/*.whl || return 1
    fi
    export PYTHONPATH=$root:$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$work/cache
    unset TRITON_INTERPRET TRITON_CACHE_DIR TRITON_HOME
    timeout -k 5 "$limit" "$python" "$root/benchmarks/gpu/first_contact.py" "$out" "$@"
}

contact "$@" 2>&1 | tee "$out/log.txt"
exit "${PIPESTATUS[0]}"
