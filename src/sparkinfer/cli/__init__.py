"""The command line: one file a verb, its heavy imports inside the verb."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; an interrupt while it is being imported is one, too."""
    try:
        from sparkinfer.cli import app
    except KeyboardInterrupt:
        return 130
    return app.main(arguments)
