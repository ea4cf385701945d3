"""`python -m quire`: the same as `quire`."""

from quire.cli.main import command

if __name__ == "__main__":
    command()
