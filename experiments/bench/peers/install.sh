#!/bin/sh
# Environments of their own for the peers: install.sh <python>. What is there stays.
set -e
here=$(dirname "$0")/.venvs
torch=torch==2.13.0 # that of constraints.txt
more="gymnasium[mujoco] ale-py opencv-python-headless"
install() { # name, packages
    [ -e "$here/$1/.installed" ] && return
    "$PYTHON" -m venv "$here/$1"
    # shellcheck disable=SC2086
    "$here/$1/bin/python" -m pip install -q "$torch" $2 $more
    touch "$here/$1/.installed"
}
PYTHON=${1:-python3}
install sbx "stable-baselines3==2.9.2 sbx-rl==0.28.0"
install torchrl "torchrl==0.14.1"
