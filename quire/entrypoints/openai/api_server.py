"""`python -m quire.entrypoints.openai.api_server`: `quire serve`, by vLLM's older name for it."""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
