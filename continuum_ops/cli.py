"""Entry point of ``continuum-ops``: what ends a command early, in one line and an exit code.

0 success, 1 failure (a full disk, say), 2 usage or a missing package, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

PROGRAM = "continuum-ops"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``args`` (None: the process's) and exit."""
    try:
        import click
    except ImportError:
        _exit(2, 'needs click: pip install "continuum_ops[train]"')
    from .commands import commands

    try:
        code = commands.main(
            args=None if args is None else list(args), prog_name=PROGRAM, standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _exit(130, "interrupted")
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        _exit(1, f"{place}{error.strerror or error}")
    sys.exit(code if isinstance(code, int) else 0)


def _exit(code: int, message: str) -> NoReturn:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
