"""A simulated federation: its participants, its rounds, and the folder that stays."""
