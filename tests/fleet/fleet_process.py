"""FleetProcess, which the load tests share."""

from loadtest.fleet import FleetProcess

__all__ = ["FleetProcess"]
