"""Several optimizers with one state (`type: portfolio`). Importing this package registers the config."""

from jaxlm.optim.portfolio.portfolio import PortfolioConfig

__all__ = ["PortfolioConfig"]
