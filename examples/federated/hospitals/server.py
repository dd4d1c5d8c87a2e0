"""What the server runs: rounds over whoever is there, its state on disk after each."""

from pathlib import Path

from flwr.serverapp import ServerApp

from equipoise.federated import FedAvg
from equipoise.federated.flower import serve
from hospitals.agreed import accuracy, make_model

app = ServerApp()


def say(done, folder):
    """Write one line per round."""
    missing = "".join(f"; owner {p} is missing: {why}" for p, why in done.absent.items())
    with (Path(folder) / "rounds.log").open("a") as log:
        log.write(
            f"round {done.number}: accuracy {done.metrics['accuracy']:.1%}, "
            f"{len(done.answered)} of {len(done.asked)} answered{missing}\n"
        )


@app.main()
def main(grid, context):
    """All rounds that the server's folder does not hold yet."""
    config = context.run_config
    serve(
        grid,
        FedAvg(),
        clients=int(config["clients"]),
        params={name: value.detach() for name, value in make_model().named_parameters()},
        rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
        wait=600.0,  # for both owners, before the first round
        folder=f"{config['folder']}/server",
        evaluate=accuracy,
        on_round=lambda done: say(done, config["folder"]),
    )
