"""The command line. A command imports what it needs when it runs, so that help comes at once."""

from raffia.cli.commands import main

__all__ = ["main"]
