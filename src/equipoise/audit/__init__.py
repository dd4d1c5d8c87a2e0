"""Audits: attacks on a training's guarantee."""
