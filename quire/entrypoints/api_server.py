"""`python -m quire.entrypoints.api_server`: `quire serve`, by vLLM's oldest name for it."""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
