"""The integer kernels in AMX tiles: compiled here, run where Bochs is, chosen where they run."""

from __future__ import annotations

import logging
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from drafters.target import TARGETS, runs_here
from server.model.cpu.integers import amx
from server.model.cpu.integers.forms import FORMS
from server.model.cpu.records import NO_TILES, TILES
from tests.model.cpu.integers import bochs, reference
from tests.model.cpu.integers.cases import inputs, multiplied, stored
from tests.model.cpu.integers.jobs import Job, job
from tests.model.cpu.integers.other_cpus import MIXED_FORMS, compile_kernels, kernels_by, said

_JOBS = 0x1000000
_SECTIONS = (
    "SECTIONS { . = ORIGIN; .all : { *(.start) *(.text*) *(.rodata*) *(.data*) *(.bss*) } "
    "/DISCARD/ : { *(.eh_frame*) *(.note*) *(.comment) } }"
)


def compile_tiles(folder: str, runs: bool) -> None:
    """In a process of its own, which alone needs the compiler."""
    from server.model.cpu.kernels.integers.tiles import define_tiled_rows

    assert TILES
    compile_kernels(
        define_tiled_rows, "x86_64-unknown-linux-gnu", "sapphirerapids", "amx", folder, runs,
        reloc="static", codemodel="small",
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of kernels.s and kernels.o."""
    return kernels_by(
        "test_amx.compile_tiles", "amx", tmp_path_factory.mktemp("amx"),
        defined_in="server.model.cpu.kernels.integers.tiles", runs=bochs.emulator() is not None,
    )  # fmt: skip


def _functions(assembly: str) -> dict[str, list[str]]:
    """Name -> instructions with what they act on."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in assembly.splitlines():
        if name := re.fullmatch(r"(tailor_\w+):.*", line):
            lines = found.setdefault(name.group(1), [])
        elif line.startswith("\t") and not line.startswith("\t."):
            lines.append(line.strip())
    return found


def test_tiles_are_multiplied_and_never_moved_out_of_the_way(compiled: Path) -> None:
    functions = _functions((compiled / "kernels.s").read_text())
    for form in MIXED_FORMS:
        # Parts of blocks that are multiplied at once: 4, and those of a block that is left over.
        parts = 1 if form.per_output else 4 + 32 // form.sub
        for tiles in (1, 2):
            lines = functions[f"tailor_integers_{form.name}_tiles_{tiles}"]
            words = [line.split()[0] for line in lines]
            # Each tile is loaded, multiplied, cleared and stored where the kernel says, and there
            # only: no more of these means that none was saved and loaded again.
            assert words.count("tdpbsud") == 2 * tiles * parts
            assert words.count("tileloadd") == (2 + tiles) * parts
            assert words.count("tilestored") == 2 * tiles * parts
            assert words.count("tilezero") == 2 * tiles * parts
        both = [line.split()[0] for line in functions[f"tailor_integers_{form.name}_any"]]
        assert (both.count("ldtilecfg"), both.count("tilerelease")) == (1, 1)


def _jobs() -> list[tuple[Job, int]]:
    """(job, rows from which on tiles multiply)."""
    numbers = [*range(1, 34), 47, 48, 200]
    jobs = [(job("int8", rows, width=192), 1) for rows in numbers]
    jobs += [(job("int8", rows, width=96), 1) for rows in (16, 40)]  # three blocks: by vectors
    jobs += [(job("int8", rows, width=576, outputs=96), 8) for rows in (7, 8, 33, 96)]
    for form in FORMS[1:]:
        jobs += [(job(form.name, rows, outputs=32), 1) for rows in (1, 9, 16, 22, 23, 31, 33)]
    jobs += [(job(name, 33, width=192), 1) for name in ("q8_0", "q4_1")]  # 4 blocks, and 2
    return [*jobs, (job("q8_0", 200, width=64), 8), (job("int8", 40), NO_TILES)]


def _laid_out(jobs: list[tuple[Job, int]]) -> bytes:
    """The jobs as amx_driver.c reads them: each part begins on a multiple of 64 bytes."""
    out = bytearray()
    for one, least in jobs:
        for part in (struct.pack("<8q", *one.head, least), *one.data, one.want.tobytes()):
            out += part + bytes(-len(part) % 64)
    return bytes(out) + struct.pack("<8q", *[-1] * 8)


def test_an_emulated_cpu_gives_numpys_bits(compiled: Path) -> None:
    gcc = shutil.which("gcc")
    if bochs.emulator() is None or gcc is None:
        pytest.skip("bochs and gcc are not both here")
    names = ", ".join(f"tailor_integers_{form.name}_any" for form in FORMS)
    program, sections = compiled / "program", compiled / "sections"
    sections.write_text(_SECTIONS.replace("ORIGIN", hex(bochs.PROGRAM)))
    made = subprocess.run(
        [
            gcc, "-O1", "-ffreestanding", "-fno-pic", "-no-pie", "-static", "-nostdlib",
            "-fno-stack-protector", "-fcf-protection=none", "-mno-red-zone", "-mamx-tile",
            "-mamx-int8", f"-DKERNELS={names}", f"-DJOBS={_JOBS:#x}",
            f'-DCODE_64="{bochs.CODE_64:#x}"', str(Path(__file__).parent / "amx_driver.c"),
            str(compiled / "kernels.o"), f"-Wl,-T,{sections}", "-Wl,--oformat=binary",
            "-Wl,--build-id=none", "-o", str(program),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    jobs = _jobs()
    memory = {bochs.PROGRAM: program.read_bytes(), _JOBS: _laid_out(jobs)}
    told = bochs.run(compiled, memory, cpu="sapphire_rapids", timeout_s=300)
    if "signed: wrong" in told:
        pytest.skip("this Bochs takes signed bytes of tiles for unsigned ones, as release 3.0 does")
    assert "signed: right" in told, told[-2000:]
    found = [line for line in told.splitlines() if line.startswith(("job ", "done: "))]
    assert found == [f"done: {len(jobs)}"]


def falls_back() -> None:
    """In a process of its own, on a CPU without tiles that is told to have them."""
    assert TILES
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("server").addHandler(handler)
    died = amx.tried_out()
    assert isinstance(died, str) and "SIGILL" in died, died
    assert amx.kernel_name() == "avx512-vnni"
    weights, x = stored("int8", 70, 256), inputs(19, 256)
    want = reference.product(reference.inputs_of(x, per_row=True), weights)
    assert np.array_equal(multiplied(x, [weights]), want)
    assert len(told) == 1 and told[0].startswith("AMX tiles are not used, avx512-vnni multiplies")


def test_a_cpu_that_only_claims_to_have_tiles_multiplies_by_vectors() -> None:
    if not runs_here(TARGETS["avx512-vnni"]) or runs_here(TARGETS["amx"]):
        pytest.skip("this CPU has no AVX-512 VNNI, or has tiles")
    said("test_amx", "test_amx.falls_back()", "amx")


@pytest.mark.parametrize(
    ("faster", "place"),
    [((True, True, True), 0), ((False, True, True), 1), ((True, False, True), 2),
     ((True, True, False), 3), ((False, False, False), 3)],
)  # fmt: skip
def test_tiles_multiply_where_they_stay_the_faster(faster: tuple[bool, ...], place: int) -> None:
    assert amx.least_rows([(1.0, 2.0) if tiles else (2.0, 1.0) for tiles in faster]) == place
