"""ServerConfig and TaskConfig: the keys of configs/server.yaml and configs/tasks/*.yaml.

Every section is a frozen pydantic model that refuses unknown keys and wrong types (a quoted "8" is
no number, `true` is no 1, nan is nothing). An error has one line per problem, in the form
`FILE:LINE: KEY: what is wrong`, so that an editor can jump to it; it lists all problems of a file.
Files are read as YAML 1.2's core schema: `off` is a string and not False, `010` is ten, there are
no tags, no anchors and no dates, a repeated key is an error, and size and depth are bounded.

Importing this module imports neither torch nor fastapi.
"""

from server.config.server import AdapterConfig as AdapterConfig
from server.config.server import EngineConfig as EngineConfig
from server.config.server import KeyConfig as KeyConfig
from server.config.server import LimitsConfig as LimitsConfig
from server.config.server import ListenConfig as ListenConfig
from server.config.server import ModelConfig as ModelConfig
from server.config.server import RestartConfig as RestartConfig
from server.config.server import ServerConfig as ServerConfig
from server.config.server import load_server_config as load_server_config
from server.config.task import DEFAULT_TASK as DEFAULT_TASK
from server.config.task import DEFAULT_TASKS as DEFAULT_TASKS
from server.config.task import SamplingDefaults as SamplingDefaults
from server.config.task import SpeculationConfig as SpeculationConfig
from server.config.task import TaskConfig as TaskConfig
from server.config.task import load_task as load_task
from server.config.task import load_tasks as load_tasks
