"""Audits: attacks on our own guarantees and on published ones."""
