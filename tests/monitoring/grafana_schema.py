"""Checks the dashboards against Grafana's own schema, without Grafana.

    python tests/monitoring/grafana_schema.py

Installs @grafana/schema (the types that Grafana's front end is made of) and
ts-json-schema-generator from npm, and jsonschema from PyPI, into a folder of their own; turns the
types of a dashboard and of the panels' options and fields into JSON schemas that allow no other
member; and holds every file of configs/grafana/dashboards against them. Needs node and npm. Prints
each complaint, then one JSON line; exits 1 when there was one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCHEMA, GENERATOR, VALIDATOR = "13.2.3", "2.4.0", "4.26.0"
TYPES = "node_modules/@grafana/schema/dist/types/raw"
CHECK = """
import json, sys
from jsonschema import Draft7Validator
work = json.load(sys.stdin)
for item in work:
    for error in Draft7Validator(json.load(open(item["schema"]))).iter_errors(item["value"]):
        where = "/".join(map(str, error.absolute_path))
        print(f"{item['name']}: {where}: {error.message[:200]}")
"""


def run(command: Sequence[str], folder: Path, text: str | None = None) -> str:
    done = subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def schema(folder: Path, kind: str, path: str, name: str) -> Path:
    """The JSON schema of one exported type."""
    made = folder / f"{kind}-{name}.json"
    if not made.exists():
        words = ["npx", "ts-json-schema-generator", "--no-type-check", "--expose", "all"]
        made.write_text(run([*words, "--path", f"{TYPES}/{path}", "--type", name], folder))
    return made


def pieces(folder: Path, file: Path) -> list[dict[str, Any]]:
    """What is held against which schema: the dashboard, and each panel's options and fields."""
    board = json.loads(file.read_text(encoding="utf-8"))
    whole = schema(folder, "dashboard", "dashboard/x/types.gen.d.ts", "Dashboard")
    found = [{"name": file.name, "schema": str(whole), "value": board}]
    for panel in board["panels"]:
        kind = panel["type"]
        if kind == "row":
            continue
        path = f"composable/{kind}/panelcfg/x/types.gen.d.ts"
        fields = panel["fieldConfig"]["defaults"].get("custom", {})
        for type_name, value in (("Options", panel["options"]), ("FieldConfig", fields)):
            found.append(
                {
                    "name": f"{file.name}: {panel['title']} ({type_name})",
                    "schema": str(schema(folder, kind, path, type_name)),
                    "value": value,
                }
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="keep the packages here; default: thrown away")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grafana-schema-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        packages = [f"@grafana/schema@{SCHEMA}", f"ts-json-schema-generator@{GENERATOR}"]
        print("installing", *packages, file=sys.stderr, flush=True)
        run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts",
             *packages], folder)  # fmt: skip
        run([sys.executable, "-m", "venv", "python"], folder)
        python = str(folder / "python" / "bin" / "python")
        run([python, "-m", "pip", "install", "-q", f"jsonschema=={VALIDATOR}"], folder)
        files = sorted((ROOT / "configs/grafana/dashboards").glob("*.json"))
        work = [piece for file in files for piece in pieces(folder, file)]
        complaints = run([python, "-c", CHECK], folder, json.dumps(work)).splitlines()
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    told = {
        "tool": "grafana_schema", "schema": SCHEMA, "files": len(files), "checked": len(work),
        "complaints": len(complaints),
    }  # fmt: skip
    print(json.dumps(told))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
