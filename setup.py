"""What pyproject.toml cannot say: a wheel has the machine code of its compiled functions in it.

`make wheel`, `pip wheel .` and `pip install .` compile it for all CPUs of this machine's kind that
drafters/target.py names; TAILOR_WHEEL_MACHINE=aarch64 makes the other kind's wheel, and
TAILOR_WHEEL_TARGETS="avx2 avx512" one with the code of these alone. An editable installation, and a
wheel for any other machine, has none: there it is made when it is needed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MACHINE = os.environ.get("TAILOR_WHEEL_MACHINE") or platform.machine()
HAS_CODE = sys.platform == "linux" and MACHINE in ("x86_64", "aarch64")


class BuildWithCode(build_py):
    """Compile beside the copies of the packages."""

    def run(self) -> None:
        super().run()
        if HAS_CODE and not self.editable_mode:
            words = ["--wheel", self.build_lib, "--machine", MACHINE]
            for target in os.environ.get("TAILOR_WHEEL_TARGETS", "").split():
                words += ["--target", target]
            subprocess.run([sys.executable, "-m", "server.machine_code", *words], check=True)


class WheelWithCode(bdist_wheel):
    """Of every Python, of one kind of machine: code calls no interpreter, and door.c's is of the
    stable ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        if not HAS_CODE:
            return super().get_tag()
        return "py3", "none", f"manylinux_2_17_{MACHINE}"


setup(cmdclass={"build_py": BuildWithCode, "bdist_wheel": WheelWithCode})
