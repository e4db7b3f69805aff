"""``python -m continuum_ops``: the command line."""

from .cli import main

if __name__ == "__main__":  # not in the processes that draw samples
    main()
