#!/usr/bin/env bash
# Run the tests with the lowest torch that pyproject.toml promises and with the newest, each in an environment of its own.
#
#   tools/torch_versions.sh [VERSION ...]        default: the lower bound of pyproject.toml, and the newest there is
#   TESTS="tests/test_foof.py" tools/torch_versions.sh 2.6.0
#
# Environments are kept under .versions/ and used again. Peers and frameworks that need another torch are left out: their tests are
# not collected. CUDA builds of torch are installed without their CUDA packages where these are not needed to import it.
set -euo pipefail
cd "$(dirname "$0")/.."
lowest=$(sed -nE 's/^dependencies = \["torch>=([0-9.]+)".*/\1.0/p' pyproject.toml)
newest=$(python3 -m pip index versions torch 2>/dev/null | sed -nE '1s/.*\(([^)]*)\).*/\1/p')
for version in "${@:-$lowest $newest}"; do
  for each in $version; do
    env=.versions/$each
    [ -x "$env/bin/python" ] || python3 -m venv "$env"
    "$env/bin/python" -m pip install --quiet "torch==$each" pytest pytest-timeout pytest-xdist hypothesis numpy scipy rich typer filelock \
      pooch requests jinja2 plotly "dask[distributed]" tqdm
    "$env/bin/python" -m pip install --quiet --no-deps -e .
    echo "torch $each:"
    "$env/bin/python" -m pytest -n 2 -q --strict-markers ${TESTS:-tests} \
      --ignore=tests/test_huggingface.py --ignore=tests/test_lightning.py --ignore=tests/test_examples.py --ignore=tests/test_docs.py \
      --ignore=tests/test_fisher_peers.py --ignore=tests/test_kfac_peers.py --ignore=tests/test_fisher_data.py --ignore=tests/test_report.py
  done
done
