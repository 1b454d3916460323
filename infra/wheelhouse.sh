#!/usr/bin/env bash
# Downloads jaxlm and its dependencies into a folder, for machines without network.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: infra/wheelhouse.sh [options]

  --extras NAMES   extras of jaxlm to install, such as gpu,gs,hf (default: gpu)
  --python NAME    interpreter of the same version as on the machines (default: python3)
  --output DIR     folder of the wheels (default: wheelhouse)
  --dry_run        print the commands, run nothing
  --help

Run it on a machine with the same operating system and processor as those without network.
TEXT
}

fail() {
  echo "infra/wheelhouse.sh: $1" >&2
  exit 2
}

extras=gpu python=python3 output=wheelhouse run=()
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry_run) run=(echo); shift ;;
    --extras | --python | --output)
      [ $# -gt 1 ] || fail "$1: a value is missing"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    *) fail "$1: unknown option" ;;
  esac
done
[[ $extras =~ ^[a-z0-9,-]*$ ]] || fail "--extras: '$extras' given, names such as gpu,gs expected"
command -v "$python" > /dev/null || fail "--python: '$python' is not on PATH"

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Wheels only: the machines without network have no compiler for anything else.
"${run[@]}" "$python" -m pip wheel --quiet --no-deps --wheel-dir "$output" "$checkout"
"${run[@]}" "$python" -m pip download --quiet --only-binary :all: -c "$checkout/constraints.txt" \
  --dest "$output" "${checkout}[$extras]"
"${run[@]}" cp "$checkout/constraints.txt" "$output/"
echo "Copy $output to the machines, and install from it there:"
printf "  python -m pip install --no-index --find-links %q -c %q 'jaxlm[%s]'\n" "$output" "$output/constraints.txt" "$extras"
