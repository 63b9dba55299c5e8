"""`python -m nemotron_moe` is the command `nemotron-moe`."""

import sys

from nemotron_moe.cli import main

if __name__ == "__main__":
    sys.exit(main())
