"""``python -m continuum_ops``: the command line."""

from .cli import main

main()
