"""A federation of several machines: Flower's apps, its nodes, and the folder of rows that each client gets."""
