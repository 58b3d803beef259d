"""python -m raffia: the command line, where the program `raffia` is not on the path."""

import sys

from raffia.cli import main

if __name__ == "__main__":
    sys.exit(main())
