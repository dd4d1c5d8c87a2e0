"""Federated methods: what each adds to the rounds of a client and of the server."""
