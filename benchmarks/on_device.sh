#!/usr/bin/env bash
# All that is measured on a GPU, in order of importance, in at most six minutes: whatever ends early, what is
# written until then is a result. Needs no network. Without a GPU it runs in small, so that it does not rot.
#
#     benchmarks/on_device.sh [FOLDER]        # where results go; on-device by default
#
# PYTHON names the interpreter. JAX Privacy is measured beside if it is installed, Opacus too.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-on-device}
python=${PYTHON:-python}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 EQUIPOISE_GRAPHS=${EQUIPOISE_GRAPHS:-0}  # 1: with CUDA graphs

has_gpu=$($python -c 'import torch; print(int(torch.cuda.is_available()))')
if [ "$has_gpu" = 1 ]; then
    rows="mlp-16 mlp cnn gpt2-small-flat lora-flat gpt2-small lora resnet20 attention gpt2 lm-256"
    few="mlp-16 mlp cnn gpt2-small-flat lora-flat resnet20 attention gpt2"
    jax="mlp-16 mlp cnn lm-64 lm-256 gpt2-small"
    on=cuda rounds=3 seconds=0.3 threads=8 slower=1
    methods="plain ours ours-training vmap opacus-hooks opacus-functorch opacus-ghost"
else
    rows="mlp-16" few="mlp-16" jax="mlp-16"
    on=cpu rounds=1 seconds=0.05 threads=1 slower=5
    methods="plain ours-training"
fi

# A part: its name, its most seconds, and the command. One that fails or takes too long ends no other.
part() {
    local name=$1 limit=$(($2 * slower))
    shift 2
    echo "== $name"
    timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt"
    echo "$name ended with ${PIPESTATUS[0]} after $SECONDS s in all" | tee -a "$out/parts.txt"
}

$python -c 'import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")' \
    | tee "$out/machine.txt"
part tests 70 "$python" -m pytest -q -x -p no:cacheprovider tests/training/test_devices.py \
    tests/privacy/test_noise_kernel.py
part graphs 45 "$python" benchmarks/graphs.py
# shellcheck disable=SC2086  # lists of names
part step 60 "$python" benchmarks/device_step.py --on "$on" --tasks $rows --steps 10
# shellcheck disable=SC2086
part compared 90 "$python" benchmarks/step_time.py --tasks $few --rounds "$rounds" --seconds "$seconds" \
    --threads "$threads" --methods $methods --out "$out/compared.json"
# shellcheck disable=SC2086
part jax 45 "$python" benchmarks/jax_privacy.py --tasks $jax --seconds "$seconds"
part training 50 "$python" -m equipoise train --data digits --device "$on" --run-dir "$out/run"
