"""The program of one rank on simulated GPUs: rank_on_stand_in.py TARGET COUNT HOST PORT RANK."""

from __future__ import annotations

import sys
import warnings

from quire.cli.simulated_gpu import stand_in
from quire.platform.gpu.cards import CARDS

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with stand_in(CARDS[sys.argv.pop(1)], int(sys.argv.pop(1))):
        from quire.executor.rank import main

        main()
