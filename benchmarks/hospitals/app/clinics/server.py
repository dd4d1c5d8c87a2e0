"""The rounds, one of whose hospitals comes late and one of whom leaves."""

from pathlib import Path

from flwr.serverapp import ServerApp
from safetensors.torch import save_file

from clinics.agreed import ROUNDS, Network, members, shared
from equipoise.federated import FedAvg
from equipoise.federated.flower import serve

app = ServerApp()


@app.main()
def main(grid, context):
    folder = Path(str(context.run_config["folder"]))

    def note(done):
        with (folder / "rounds.log").open("a") as log:
            log.write(f"round {done.number}: answered {done.answered}, absent {dict(done.absent)}\n")

    found = serve(
        grid, FedAvg(weights="size"), clients=5, params=shared(Network()), rounds=ROUNDS, timeout=60.0,
        members=members, folder=folder / "server", on_round=note,
    )  # fmt: skip
    save_file(found.params, folder / "model.safetensors")
