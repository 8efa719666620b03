"""The command line: one file a verb, its heavy imports inside the verb."""

from sparkinfer.cli.app import main

__all__ = ["main"]
