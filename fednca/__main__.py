"""`python -m fednca` is the command `fednca`, for environments whose `bin` is not on the path."""

import sys

from fednca.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
