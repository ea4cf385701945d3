"""Measures the mechanisms and draws their plots.

    python -m benchmarks.mechanisms                         # all: about five minutes on two cores
    python -m benchmarks.mechanisms preemption sampling     # some
    python -m benchmarks.mechanisms --draw                  # draws what was measured before

Writes benchmarks/mechanisms/data/NAME.json and docs/images/mechanisms/NAME.svg.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.mechanisms.all import DATA, MECHANISMS, PICTURES, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MECHANISMS))
    parser.add_argument("--draw", action="store_true", help="do not measure again")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MECHANISMS):
        parser.error(f"no mechanism is called {min(unknown)}; there are {', '.join(MECHANISMS)}")
    for name in options.names or MECHANISMS:
        measure, _ = MECHANISMS[name]
        if measure is not None and not options.draw:
            (DATA / f"{name}.json").write_text(json.dumps(measure()) + "\n", encoding="utf-8")
        (PICTURES / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main()
