#!/usr/bin/env bash
# Several processes of one run on this machine, each with some of its GPUs, or with CPU devices.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: infra/local.sh [options] -- ARGUMENTS OF jaxlm train

  --processes N   number of processes (default: 2)
  --gpus N        GPUs of each process; process 0 gets the first N (default: 0, and JAX chooses its devices)
  --port PORT     port of the coordinator on this machine (default: a free one)
  --retries N     how often the run starts again after a hang, 143 or a killed process (default: 0)
  --wait_s N      seconds before it is started again (default: 30)
  --others_s N    seconds that the other processes get to end by themselves once one has failed (default: 20)
  --log_dir DIR   output of each process (default: logs/local)
  --no_check      do not check the configuration before the start
  --dry_run       check the configuration and print the commands, run nothing
  --help

Without --gpus, select devices with JAX_PLATFORMS and XLA_FLAGS. The exit code is that of the run.
TEXT
}

fail() {
  echo "infra/local.sh: $1" >&2
  exit 2
}

processes=2 gpus=0 port="" retries=0 wait_s=30 others_s=20 log_dir=logs/local dry_run=false check=true
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry_run) dry_run=true; shift ;;
    --no_check) check=false; shift ;;
    --processes | --gpus | --port | --retries | --wait_s | --others_s | --log_dir)
      [ $# -gt 1 ] || fail "$1: a value is missing"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --) shift; break ;;
    *) fail "$1: unknown option. The arguments of jaxlm train come after --" ;;
  esac
done
[ $# -gt 0 ] || fail "give the arguments of jaxlm train after --"
# No leading zeros, which bash reads as octal, and nothing that its arithmetic cannot hold.
check_number() {
  [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "$2" -ge "$3" ] && [ "$2" -le "$4" ] ||
    fail "$1: '$2' given, a number from $3 to $4 expected"
}
check_number --processes "$processes" 1 4096
check_number --gpus "$gpus" 0 1024
check_number --retries "$retries" 0 999999
check_number --wait_s "$wait_s" 0 999999
check_number --others_s "$others_s" 0 999999
[ -z "$port" ] || check_number --port "$port" 1 65535

# A port below those of outgoing connections, one of which could otherwise take it before process 0 does.
free_port() {
  python -c '
import random, socket
while True:
    port = random.randint(12_000, 31_999)
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            continue
    print(port)
    break'
}

# The command of process $1, in the array `command`.
render() {
  command=(python -m jaxlm.train "${train[@]}")
  if [ "$processes" -gt 1 ]; then
    command+=(--trainer.distributed.coordinator_address "127.0.0.1:$address_port")
    command+=(--trainer.distributed.num_processes "$processes" --trainer.distributed.process_id "$1")
  fi
  if [ "$gpus" -gt 0 ]; then
    command=(env "CUDA_VISIBLE_DEVICES=$(seq -s, $(($1 * gpus)) $(($1 * gpus + gpus - 1)))" "${command[@]}")
  fi
}

# Waits for process $1, also when a signal interrupts that; `ended` becomes its exit code.
wait_for() {
  local now
  ended=""
  while true; do
    signaled=false now=0
    wait "$1" || now=$?
    # 127 means that the program was not found, or after a signal, that the `wait` before had returned the code already.
    if [ "$now" -ne 127 ] || [ -z "$ended" ]; then ended=$now; fi
    $signaled || return 0
  done
}

# Passes a signal on to the processes, so that they save.
pass_on() {
  signaled=true stopped=$2
  kill -"$1" "${pids[@]}" 2>/dev/null || true
}

# Ends processes that were started after a signal had been passed on.
pass_on_again() {
  [ "$stopped" -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
}

# Whether the run can start again after exit code $1, as in infra/attempts.py: 75 means that the run ended because it hung, 143
# saved after SIGTERM, others above 128 a killed process.
may_retry() {
  [ "$1" -eq 75 ] || { [ "$1" -gt 128 ] && [ "$1" -ne 130 ] && [ "$1" -ne 141 ]; }
}

# The exit code of the run is the one that ranks highest: a configuration error or Ctrl-C, then that of a lost process, then
# the 1 of the others.
rank() {
  if [ "$1" -le 1 ]; then
    echo "$1"
  elif may_retry "$1"; then
    echo 2
  else
    echo 3
  fi
}

# Pauses for a moment, without a process of its own.
tick() {
  read -rt "$tick_s" -u 3 || true
}

# Waits until no process runs. Once one has failed, the others are ended after a while, because those that are not connected
# yet would wait for it for minutes. The exit codes of these do not count.
wait_for_all() {
  local number running deadline=""
  running=("${!pids[@]}")
  while [ "${#running[@]}" -gt 0 ]; do
    tick
    for number in "${running[@]}"; do
      ! kill -0 "${pids[$number]}" 2>/dev/null || continue
      unset "running[$number]"
      wait_for "${pids[$number]}"
      [ "$deadline" != passed ] || continue
      [ "$(rank "$ended")" -le "$(rank "$code")" ] || code=$ended
      # Others may still save after a signal.
      [ "$ended" -eq 0 ] || [ "$ended" -eq 143 ] || [ "$stopped" -ne 0 ] || deadline=${deadline:-$((SECONDS + others_s))}
    done
    if [[ $deadline =~ ^[0-9]+$ ]] && [ "$SECONDS" -ge "$deadline" ] && [ "${#running[@]}" -gt 0 ]; then
      deadline=passed
      echo "infra/local.sh: a process ended with $code; ending those that still wait for it: ${running[*]}" >&2
      for number in "${running[@]}"; do
        kill -TERM "${pids[$number]}" 2>/dev/null || true
      done
    fi
  done
}

# Runs all processes; `code` becomes the exit code of the run.
attempt() {
  local number
  pids=() code=0 address_port=$port
  [ "$processes" -eq 1 ] || address_port=${port:-$(free_port)}
  for ((number = 0; number < processes; number++)); do
    render "$number"
    "${command[@]}" > >(tee -a "$log_dir/$number.log" | sed -u "s/^/[$number] /") 2>&1 3>&- &
    pids+=($!)
  done
  pass_on_again
  wait_for_all
}

# Waits before the next attempt, or until a signal.
pause() {
  sleep "$wait_s" &
  pids=($!)
  pass_on_again
  wait_for "${pids[0]}"
}

train=("$@") stopped=0
if $check; then
  preflight=$(dirname "${BASH_SOURCE[0]}")/preflight.py
  python "$preflight" --devices $((processes * gpus)) --slices "$processes" -- "${train[@]}" || exit
fi
if $dry_run; then
  address_port=${port:-PORT}
  for ((number = 0; number < processes; number++)); do
    render "$number"
    printf '%q ' "${command[@]}" | sed 's/ $//'
    echo
  done
  exit 0
fi
mkdir -p "$log_dir"
tick_s=0.1
[ "${BASH_VERSINFO[0]}" -ge 4 ] || tick_s=1
exec 3<> <(:)
pids=()
trap 'pass_on TERM 143' TERM
trap 'pass_on INT 130' INT
set -m # own process groups: Ctrl-C reaches the processes once, from this script
while true; do
  attempt
  may_retry "$code" || exit "$code"
  [ "$stopped" -eq 0 ] || exit "$stopped"
  [ "$retries" -gt 0 ] || exit "$code"
  retries=$((retries - 1))
  echo "infra/local.sh: ended with $code; starting again in $wait_s s, $retries times left" >&2
  pause
  [ "$stopped" -eq 0 ] || exit "$stopped"
done
