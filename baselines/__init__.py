"""Federated methods to compare with, beside the package.

`equipoise federate --method baselines.moon:MOON` runs one from a checkout of the repository; `README.md` has
the list.
"""
