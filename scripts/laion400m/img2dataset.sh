# shellcheck shell=bash
# Sourced by download.sh: sets IMG2DATASET to a virtual environment of its own (.venv-img2dataset in the checkout) that
# has img2dataset, because that needs an older pandas than this package may have.

IMG2DATASET=$PWD/.venv-img2dataset
# 1.47.0 has the options that are used here. What it requires itself is bounded but for pyarrow: 26 is what was tried.
packages=('img2dataset==1.47.0' 'pyarrow<27')
mkdir -p "$IMG2DATASET"
exec 9>"$IMG2DATASET/lock" # two downloads may begin at once
flock 9 || true # a file system without locks
if ! cmp -s <(printf '%s\n' "${packages[@]}") "$IMG2DATASET/installed"; then
    echo "installing img2dataset into $IMG2DATASET (800 MB)" >&2
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version)'
    python3 -m venv "$IMG2DATASET"
    echo '*' >"$IMG2DATASET/.gitignore"
    "$IMG2DATASET/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
    printf '%s\n' "${packages[@]}" >"$IMG2DATASET/installed"
fi
exec 9>&-
export NO_ALBUMENTATIONS_UPDATE=1 # no look for newer versions at every start
