#!/usr/bin/env bash
# A notebook as text and back. nb.sh text NB.ipynb -> NB.scratch.py;  nb.sh save NB.ipynb: take the text back, run it, export.
set -euo pipefail
verb=$1 nb=$2 scratch=${2%.ipynb}.scratch.py
bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
export PATH=$bin:$PATH OMP_NUM_THREADS=1 PYTHONHASHSEED=0
case $verb in
  text) jupytext -q --to py:percent --opt notebook_metadata_filter=-all "$nb" -o "$scratch" ;;
  save) if [ -f "$nb" ]; then jupytext -q --to ipynb --update "$scratch" -o "$nb"; else jupytext -q --to ipynb --set-kernel python3 "$scratch" -o "$nb"; fi
        nbdev_export && python "$(dirname "$0")/run_nb.py" "$nb" --timeout 900 && nbdev_clean --fname "$nb" ;;
  *) echo "usage: nb.sh text|save NOTEBOOK.ipynb" >&2; exit 2 ;;
esac
