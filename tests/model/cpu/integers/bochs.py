"""A program run alone in Bochs, an emulator of whole PCs: it has CPUs that others lack.

There is no BIOS, no disk and no system: a ROM of some bytes goes to 32-bit mode and jumps into the
program, which lies in memory with its data. What it writes to port 0xe9 is its output.
docs/benchmarks/servers.md says how to get the emulator.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

PROGRAM = 0x200000
"""Where a program begins, in 32-bit mode."""

CODE_64 = 0x20
"""The selector of 64-bit code."""

_MOST_BYTES = 8 << 20  # of a piece of memory that Bochs loads

_SETTINGS = """
config_interface: textconfig
display_library: nogui
cpu: model={cpu}, count=1, ips=100000000, reset_on_triple_fault=0
memory: guest=256, host=256, block_size=8192
romimage: file={folder}/rom
vgaromimage: file={folder}/vga
{images}
port_e9_hack: enabled=1
log: {folder}/log
panic: action=fatal
error: action=ignore
info: action=ignore
"""


def emulator() -> str | None:
    """The program `bochs`, or that of TAILOR_TEST_BOCHS."""
    return os.environ.get("TAILOR_TEST_BOCHS") or shutil.which("bochs")


def _rom() -> bytes:
    """64 KB that end at 4 GB, and again at 1 MB: the first instruction is 16 bytes before."""
    rom = bytearray(b"\xff" * 0x10000)
    pieces = {
        0xFFF0: "e9 0dff",  # jmp ff00
        0xFF00: "fa 66 2e 0f 01 16 80 ff",  # cli; lgdt cs:[ff80]
        0xFF08: "0f 20 c0 0c 01 0f 22 c0",  # cr0 |= 1
        0xFF10: "66 ea 40 ff 0f 00 10 00",  # jmp 10:000fff40
        0xFF40: "66 b8 18 00 8e d8 8e c0 8e d0",  # ds = es = ss = 18
        0xFF4A: f"b8 {PROGRAM.to_bytes(4, 'little').hex()} ff e0",  # jmp program
        0xFF80: "27 00 88 ff 0f 00",  # 5 descriptors at fff88: two empty, code, data, 64-bit code
        0xFF98: "ff ff 00 00 00 9b cf 00 ff ff 00 00 00 93 cf 00 ff ff 00 00 00 9b af 00",
    }
    rom[0xFF88:0xFF98] = bytes(16)
    for at, code in pieces.items():
        raw = bytes.fromhex(code)
        rom[at : at + len(raw)] = raw
    return bytes(rom)


def run(folder: Path, memory: Mapping[int, bytes], *, cpu: str, timeout_s: float) -> str:
    """What a program wrote, until it writes the letters of `Shutdown` to port 0x8900.

    memory: up to 4 pieces by address, multiples of 2 MB, that do not share 8 MB; the program's is
    PROGRAM. Raises RuntimeError with the end of the emulator's log when it fails.
    """
    bochs = emulator()
    assert bochs is not None
    lines = []
    for i, (at, data) in enumerate(memory.items(), 1):
        assert at % _MOST_BYTES + len(data) <= _MOST_BYTES and i <= 4, "more than Bochs loads"
        (folder / f"image{i}").write_bytes(data)
        lines.append(f"optramimage{i}: file={folder}/image{i}, address={at:#x}")
    (folder / "rom").write_bytes(_rom())
    (folder / "vga").write_bytes(bytes(2048))
    settings = _SETTINGS.format(cpu=cpu, folder=folder, images="\n".join(lines))
    (folder / "settings").write_text(settings)
    done = subprocess.run(
        [bochs, "-q", "-f", str(folder / "settings")], stdin=subprocess.DEVNULL,
        capture_output=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    log = folder / "log"
    told = log.read_text(errors="replace") if log.exists() else done.stderr.decode(errors="replace")
    failed = [line for line in told.splitlines() if "PANIC" in line and "Shutdown" not in line]
    if failed or not log.exists():
        raise RuntimeError("\n".join(failed) or told[-2000:])
    return done.stdout.decode(errors="replace")
