"""The messages between packages, as plain msgspec structures. All packages may import this one."""
