"""Several models behind one port. Each has its own engine and its own app; a dispatcher sends requests to them."""
