"""The ledger, its journal, what a run has used and spent, and replays for tests."""
