"""Turns between two halves of a step: while one half waits for other ranks, the other one computes."""


class Turns:
    """The turns of a step that is not divided: there is no other half."""

    def pass_on(self) -> None:
        """Let the other half compute until it waits, too. Call it before waiting for other ranks."""
