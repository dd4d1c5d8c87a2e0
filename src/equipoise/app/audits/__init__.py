"""Audits as the command line runs them."""
