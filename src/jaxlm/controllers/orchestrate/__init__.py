"""The orchestrator: a controller that chooses between the strategies of a portfolio of optimizers."""

from jaxlm.controllers.orchestrate import orchestrator as orchestrator  # registers `type: orchestrator`
