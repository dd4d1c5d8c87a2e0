"""Audits as the command line runs them: of a finished run, and by shadow models."""
