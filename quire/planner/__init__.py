"""The capacity planner of `quire plan`: which layouts fit, their latency under a load, and their cost."""
