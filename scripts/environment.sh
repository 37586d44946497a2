# Sourced by the other scripts: sets PYTHON to an interpreter that has the package with its test tools.
# A virtual environment is made in the checkout (.venv) if none is there, and brought up to date when pyproject.toml
# changed. OPENCLIP_LINATTN_PYTHON=/path/to/python uses that interpreter as it is and installs nothing.

if [ -n "${OPENCLIP_LINATTN_PYTHON:-}" ]; then
    PYTHON=$OPENCLIP_LINATTN_PYTHON
else
    PYTHON=.venv/bin/python
    if [ ! -x "$PYTHON" ]; then
        python3 -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version if sys.version_info < (3, 10) else 0)'
        echo "making the virtual environment .venv" >&2
        python3 -m venv .venv
    fi
    stamp=.venv/installed-from-pyproject.toml
    if ! cmp -s pyproject.toml "$stamp"; then
        echo "installing the package and its test tools into .venv (PyTorch is large: some minutes)" >&2
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable '.[test]'
        cp pyproject.toml "$stamp"
    fi
fi
export PYTHON
