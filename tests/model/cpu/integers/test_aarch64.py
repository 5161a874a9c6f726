"""The integer kernels of AArch64: compiled here, and run where qemu and a cross compiler are."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.target import TARGETS, chosen
from server.model.cpu.integers.forms import FORMS
from tests.model.cpu.integers.jobs import job
from tests.model.cpu.integers.other_cpus import compile_kernels, kernels_by

# Target -> its instruction.
KERNELS = {"neon-dotprod": "sdot", "neon-i8mm": "usdot"}
_NAMES = [f"tailor_integers_{form.name}" for form in FORMS]

# Reads what jobs.py makes, and writes the products of all rows with all panels.
_DRIVER = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef int64_t i;
typedef void kernel(i x, i ldx, i figures, i ldf, i rows, i panel, i count, i out, i ldo, i next);
kernel KERNELS;
static kernel *kernels[] = {KERNELS};
static char *bytes(i size) {
  char *p = aligned_alloc(64, (size + 63) / 64 * 64);
  if (fread(p, 1, size, stdin) != (size_t)size) exit(2);
  return p;
}
int main(void) {
  i h[7];
  while (fread(h, 8, 7, stdin) == 7) {
    i form = h[0], rows = h[1], ldx = h[2], ldf = h[3], count = h[4], panels = h[5], size = h[6];
    char *x = bytes(rows * ldx), *figures = bytes(rows * ldf), *panel = bytes(panels * size);
    i ldo = panels * 128;
    float *out = calloc(rows, ldo);
    for (i p = 0; p < panels; p++)
      kernels[form]((i)x, ldx, (i)figures, ldf, rows, (i)(panel + p * size), count,
                    (i)(out + p * 32), ldo, p + 1 < panels ? (i)(panel + (p + 1) * size) : 0);
    fwrite(out, 1, rows * ldo, stdout);
  }
  return 0;
}
""".replace("KERNELS", ", ".join(_NAMES))


def _tools() -> tuple[str | None, str | None]:
    """The emulator and the compiler, where they are."""
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    return qemu, shutil.which("aarch64-linux-gnu-gcc")


def compile_for_arm(folder: str, runs: bool) -> None:
    """In a process of its own."""
    from server.model.cpu.kernels.integers import vectors
    from server.model.cpu.records import INTEGER_KERNEL

    kernel = chosen().name
    assert kernel == INTEGER_KERNEL, f"{INTEGER_KERNEL} was chosen"
    compile_kernels(
        vectors.define_rows, "aarch64-unknown-linux-gnu", TARGETS[kernel].cpu, kernel, folder, runs
    )


@pytest.fixture(scope="module", params=KERNELS)
def compiled(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(kernel, folder of kernels.s and kernels.o)."""
    return request.param, kernels_by(
        "test_aarch64.compile_for_arm", request.param, tmp_path_factory.mktemp(request.param),
        defined_in="server.model.cpu.kernels.integers.vectors", runs=all(_tools()),
    )  # fmt: skip


def test_kernels_compile_to_their_instruction_and_call_nothing(compiled: tuple[str, Path]) -> None:
    kernel, folder = compiled
    lines = (folder / "kernels.s").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("\t")]
    assert any(word[0] == KERNELS[kernel] and ".4s" in word[1] for word in words)
    assert any(word[0] == "fmla" for word in words)
    called = {word[1] for word in words if word[0] == "bl"}
    assert all(name.startswith("tailor_integers_") for name in called), called


def test_an_emulated_cpu_gives_numpys_bits(compiled: tuple[str, Path]) -> None:
    qemu, gcc = _tools()
    if qemu is None or gcc is None:
        pytest.skip("qemu-aarch64 and aarch64-linux-gnu-gcc are not both here")
    _, folder = compiled
    source, program = folder / "driver.c", folder / "driver"
    source.write_text(_DRIVER)
    made = [gcc, "-O1", "-static", str(source), str(folder / "kernels.o"), "-o", str(program)]
    subprocess.run(made, check=True, capture_output=True, timeout=120)
    jobs = [job(form.name, rows) for form in FORMS for rows in (1, 2, 5, 11)]
    sent = b"".join(struct.pack("<7q", *one.head) + b"".join(one.data) for one in jobs)
    done = subprocess.run(
        [qemu, "-cpu", "max", str(program)], input=sent, check=True, capture_output=True,
        timeout=120,
    )  # fmt: skip
    got = np.frombuffer(done.stdout, np.float32)
    want = np.concatenate([one.want.ravel() for one in jobs])
    assert np.array_equal(got, want)
