"""trustedrouter-provider-check against a running server, up to the tiers that put load on it.

    python tests/conformance/provider_check.py --base-url http://127.0.0.1:8000/v1

Installs the checker from the package index at run time. Tiers 1 to 5: models, calls, chat, streams,
tools and structured output; tier 6 samples performance and is left out. The exit status is the
checker's, which counts tiers 1 to 4; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from environment import add_options, environment, run, served_model, work_folder

VERSION = "0.1.8"
HIGHEST_TIER = 5


def statuses(report: Any) -> Counter[str]:
    """How often each status is in a report, whatever its layout."""
    found: Counter[str] = Counter()
    if isinstance(report, dict):
        if isinstance(status := report.get("status"), str):
            found[status] += 1
        for value in report.values():
            found += statuses(value)
    elif isinstance(report, list):
        for value in report:
            found += statuses(value)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--tier", type=int, default=HIGHEST_TIER, help="highest tier to run")
    parser.add_argument("--version", default=VERSION, help=f"of the checker ({VERSION})")
    options = parser.parse_args(arguments)
    model = options.model or served_model(options.base_url)
    with work_folder(options.work_dir) as folder:
        python = environment(
            folder, "provider-check", [f"trustedrouter-provider-check=={options.version}"]
        )
        report = folder / "provider-check.json"
        status = run(
            [
                python.parent / "trustedrouter-provider-check",
                "--base-url", options.base_url, "--model", model,
                "--tier", str(options.tier), "--max-sweep-models", "1", "--json", report,
            ],
            folder,
        )  # fmt: skip
        found = statuses(json.loads(report.read_text())) if report.exists() else Counter()
    told = {"tool": "trustedrouter-provider-check", "version": options.version, "model": model}
    print(json.dumps({**told, "tier": options.tier, "status": status, "results": dict(found)}))
    return status


if __name__ == "__main__":
    sys.exit(main())
