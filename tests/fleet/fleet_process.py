"""FleetProcess, which the load tests share."""

from loadtest.fleet_process import FleetProcess

__all__ = ["FleetProcess"]
