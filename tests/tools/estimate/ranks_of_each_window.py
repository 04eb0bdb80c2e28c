"""Runs ranks as `planc.tools.measure.one_rank`, with one attention call for each window."""

import sys
from contextlib import nullcontext

from planc.simulate import fake_ranks
from planc.tools.measure.one_rank import main

if __name__ == "__main__":
    fake_ranks.merged_windows = nullcontext
    sys.exit(main())
