"""The papers' claims run again: `python -m reproduction` lists the experiments.

It uses the library as any user does. The library never imports it, and the wheel leaves it out.
"""
