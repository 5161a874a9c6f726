"""Launched: how much a piece of code launches."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Launched(TorchDispatchMode):
    """Counts torch operations that compute or copy; views and empty memory launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and "empty" not in str(func) and "detach" not in str(func):
            self.num += 1
        return func(*args, **(kwargs or {}))
