"""What an owner runs: its data, its noise and its ledger stay in its own folder."""

from pathlib import Path

import equipoise as eq
from equipoise.federated import Client
from equipoise.federated.flower import client_app, client_number
from hospitals.agreed import BUDGET, CLIP_NORM, RECORDS, loss, make_model, records


def build(context):
    """The client of this node; it goes on with what its folder holds."""
    K = int(context.run_config["local-steps"])
    number = client_number(context)
    return Client(
        make_model(),
        loss,
        records(number),
        eq.Poisson(expected_batch_size=140, population=RECORDS, steps=int(context.run_config["rounds"]) * K),
        eq.DPSGD(clip_norm=CLIP_NORM),
        local_steps=K,
        budget=BUDGET,
        learning_rate=4.0,
        run=Path(str(context.node_config["folder"])) / f"owner-{number}",
    )


app = client_app(build)
