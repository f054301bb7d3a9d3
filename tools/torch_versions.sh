#!/usr/bin/env bash
# Run the tests with the lowest torch that pyproject.toml promises and with the newest, each in an environment of its own.
#
#   tools/torch_versions.sh [VERSION ...]        default: the lower bound of pyproject.toml, and the newest there is
#
# Environments are kept under .versions/ and used again. What needs other packages that pin their own torch (Lightning, transformers, the
# peers), and what shows the study, is tested with the version of constraints.txt alone.
set -euo pipefail
cd "$(dirname "$0")/.."
lowest=$(sed -nE 's/^dependencies = \["torch>=([0-9.]+)".*/\1.0/p' pyproject.toml)
newest=$(python3 -m pip index versions torch 2>/dev/null | sed -nE '1s/.*\(([^)]*)\).*/\1/p')
[ $# -gt 0 ] || set -- "$lowest" "$newest"
elsewhere="huggingface lightning examples docs fisher_peers kfac_peers fisher_data report"
for version; do
  env=.versions/$version
  [ -x "$env/bin/python" ] || python3 -m venv "$env"
  "$env/bin/python" -m pip install --quiet "torch==$version" pytest pytest-timeout pytest-xdist hypothesis numpy scipy rich typer filelock \
    pooch requests jinja2 plotly "dask[distributed]" tqdm
  "$env/bin/python" -m pip install --quiet --no-deps -e .
  echo "torch $version:"
  "$env/bin/python" -m pytest -n 2 -q $(for file in $elsewhere; do printf -- '--ignore=tests/test_%s.py ' "$file"; done)
done
