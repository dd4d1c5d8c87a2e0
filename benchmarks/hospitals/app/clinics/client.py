"""Opens the client for each message."""

from clinics.agreed import opened
from equipoise.federated.flower import client_app, client_number

app = client_app(lambda context: opened(client_number(context), str(context.node_config["folder"])))
