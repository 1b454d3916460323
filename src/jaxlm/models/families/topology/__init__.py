"""Models whose layers are written in the YAML (`type: topology`). Importing this package registers their config."""

from jaxlm.models.families.topology.model import TopologyConfig

__all__ = ["TopologyConfig"]
