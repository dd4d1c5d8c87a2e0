"""The folder of a run: its files, checkpoints and model; how a published run is verified and signed."""
