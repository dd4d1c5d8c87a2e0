"""Passes messages on to a client that stays open."""

from equipoise.federated.flower import forwarding_app

app = forwarding_app()
