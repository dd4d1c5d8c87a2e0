"""A Flower app: `server.py` for whoever runs the SuperLink, `client.py` for every data owner."""
