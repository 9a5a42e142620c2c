"""``python -m opteq`` is the command ``opteq``."""

import sys

from opteq.common.errors import MissingExtraError, needs_extra


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        with needs_extra("cli"):
            from opteq.cli import app
    except MissingExtraError as error:
        print(f"opteq: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    app(prog_name="opteq")


if __name__ == "__main__":
    main()
