"""`python -m planc` is the command `planc`."""

from __future__ import annotations

import sys

from planc.cli import main

if __name__ == "__main__":
    sys.exit(main())
