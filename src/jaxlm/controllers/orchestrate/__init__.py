"""The orchestrator: a controller that chooses between the strategies of a portfolio of optimizers."""
