"""The types of numpy arrays that the package names.

x2 stands for two axes, and so on; without it there is one. Compiled functions that Python calls
take exactly these, in C order (drafters/jit.py); elsewhere an array of one axis may have more.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]

Int32x2 = Annotated[Int32, 2]
Int64x2 = Annotated[Int64, 2]
Float32x2 = Annotated[Float32, 2]
Float64x2 = Annotated[Float64, 2]
UInt8x2 = Annotated[UInt8, 2]
