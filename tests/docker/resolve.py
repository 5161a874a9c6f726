"""Whether what docker/Dockerfile installs can be installed together, by pip's resolver.

    python -m tests.docker.resolve

Nothing is installed and no wheel of torch or CUDA is fetched: pip reads the metadata that the
package index keeps beside them. It resolves for the Python and the machine that run it, from pip's
usual index, where torch is the CUDA build. Prints what was chosen; exits 1 where nothing fits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def asked(dockerfile: str) -> list[str]:
    """What the image's pip lines install, the extras as they are by default."""
    extras = re.search(r"^ARG EXTRAS=(\S+)$", dockerfile, re.MULTILINE)
    torch = re.search(r"-c constraints\.txt (torch==\S+)", dockerfile)
    assert extras and torch and '".${EXTRAS}"' in dockerfile
    return [torch[1], f"{REPOSITORY}{extras[1]}"]


def resolve(requirements: list[str]) -> dict[str, str]:
    """Name -> version of all that pip would install. Raises CalledProcessError where it cannot."""
    # --isolated: not the folder of wheels that this machine may have; its certificates, though.
    certificates = os.environ.get("PIP_CERT")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                sys.executable, "-m", "pip", "--isolated", "--quiet", "install", "--dry-run",
                "--ignore-installed", "--only-binary", ":all:", "--report", str(report),
                "-c", str(REPOSITORY / "constraints.txt"), *requirements,
                *(["--cert", certificates] if certificates else []),
            ],
            check=True,
        )  # fmt: skip
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {i["metadata"]["name"].lower(): i["metadata"]["version"] for i in installs}


def main() -> int:
    """Resolve and print."""
    requirements = asked((REPOSITORY / "docker" / "Dockerfile").read_text(encoding="utf-8"))
    try:
        found = resolve(requirements)
    except subprocess.CalledProcessError as error:
        return error.returncode
    for name, version in sorted(found.items()):
        sys.stdout.write(f"{name}=={version}\n")
    if not any(name.startswith("nvidia-") for name in found):
        sys.stdout.write("this torch brings no CUDA libraries: is it a CPU's build?\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
