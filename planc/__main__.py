"""`python -m planc` is the command `planc`."""

import sys

from planc.cli import main

if __name__ == "__main__":
    sys.exit(main())
