"""The fleet: replicas of an engine on many machines behind replicas of the HTTP application.

Ray Serve places and restarts them (the extra `ray`); nothing outside this package imports Ray, and
of this package only app.py, task_router.py and local.py do.

    client -> proxy -> ingress (server.api, unchanged)       docs/fleet.md
                         EngineClient -> far_engine.FleetHandle -> one stream a Request
                                                                     |  task_router.TaskRouter
                       engine replica (replica.EngineReplica) <------+
                         EngineClient -> the engine's process, unchanged
"""
