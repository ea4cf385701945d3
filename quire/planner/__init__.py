"""The capacity planner of `quire plan`: which layouts fit, how fast they answer a load, and what that costs."""
