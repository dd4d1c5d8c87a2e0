"""Subspaces of the parameters: held columns, columns from a seed, blocks, principal directions of rows."""
