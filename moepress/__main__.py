"""`python -m moepress`: the command line, for environments whose scripts are not on PATH."""

from moepress.cli import main

main()
