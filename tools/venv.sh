#!/usr/bin/env bash
# Runs a command with the programs of the virtual environment first: git starts hooks without it.
bin=${VENV:-.venv}/bin
[[ ! -d $bin ]] || PATH=$(cd "$bin" && pwd):$PATH
exec "$@"
