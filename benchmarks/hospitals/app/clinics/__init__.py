"""Five hospitals: the same clients in one process and behind Flower."""
