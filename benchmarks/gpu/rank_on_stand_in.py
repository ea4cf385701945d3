"""The program of one rank on a stand-in for a GPU: rank_on_stand_in.py TARGET HOST PORT RANK."""

from __future__ import annotations

import sys
import warnings

from quire.gpu.cards import CARDS
from quire.gpu.stand_in import stand_in

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with stand_in(CARDS[sys.argv.pop(1)]):
        from quire.executor.rank import main

        main()
