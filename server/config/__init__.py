"""ServerConfig and TaskConfig: the keys of configs/server.yaml and configs/tasks/*.yaml.

Every section is a frozen pydantic model that refuses unknown keys and wrong types (a quoted "8" is
no number, `true` is no 1, nan is nothing). An error has one line per problem, in the form
`FILE:LINE: KEY: what is wrong`, so that an editor can jump to it; it lists all problems of a file.
Files are read as YAML 1.2's core schema: `off` is a string and not False, `010` is ten, there are
no tags, no anchors and no dates, a repeated key is an error, and size and depth are bounded.

Importing this module imports neither torch nor fastapi.
"""

from server.config.server import (
    AdapterConfig,
    EngineConfig,
    KeyConfig,
    LimitsConfig,
    ListenConfig,
    ModelConfig,
    RestartConfig,
    ServerConfig,
    load_server_config,
)
from server.config.task import (
    DEFAULT_TASK,
    DEFAULT_TASKS,
    SamplingDefaults,
    SpeculationConfig,
    TaskConfig,
    load_task,
    load_tasks,
)

__all__ = [
    "DEFAULT_TASK",
    "DEFAULT_TASKS",
    "AdapterConfig",
    "EngineConfig",
    "KeyConfig",
    "LimitsConfig",
    "ListenConfig",
    "ModelConfig",
    "RestartConfig",
    "SamplingDefaults",
    "ServerConfig",
    "SpeculationConfig",
    "TaskConfig",
    "load_server_config",
    "load_task",
    "load_tasks",
]
