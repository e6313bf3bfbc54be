"""`python -m sidcomp`: the command `sidcomp` where the scripts of pip are not on the PATH."""

from sidcomp.cli.app import main

main()
