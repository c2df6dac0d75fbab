#!/usr/bin/env bash
# pykmip.sh DIR: installs PyKMIP, the server of the tests of KMIP, into a virtual environment
# of Python, and there pykmip-python, which runs Python with it.
set -euo pipefail
dir=$(realpath -m "$1")
python3 -m venv --clear "$dir"
"$dir/bin/pip" install -q pykmip==0.11.0
printf '#!/bin/sh\nexec "%s/bin/python" "$@"\n' "$dir" >"$dir/pykmip-python"
chmod +x "$dir/pykmip-python"
