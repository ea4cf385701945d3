"""What the rooms say to each other: plain msgspec structures, the lowest room of the house."""
