"""The messages that the packages exchange, as plain msgspec structures. Every other package may import this one."""
