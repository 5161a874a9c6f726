"""trustedrouter-provider-check against a running server, up to the tiers that put load on it.

    python tests/conformance/provider_check.py --base-url http://127.0.0.1:8000/v1

Installs the checker from the package index at run time. Tiers 1 to 5: models, calls, chat, streams,
tools and structured output; tier 6 samples performance and is left out. The exit status is the
checker's, which counts tiers 1 to 4; the last line is JSON.

One check asks the model to "reply exactly PONG", and a small model may say something else. With
`--model-folder FOLDER` (`tailor models fetch NAME` prints it) the same chat is answered greedily by
the server and by transformers' own generate in float32: `pong` in the last line tells both texts
and whether they are the same, so that a failure can be told from the server's.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from environment import environment, options_of, run, served_model, work_folder

VERSION = "0.1.8"
HIGHEST_TIER = 5
PONG_PROMPT = "reply exactly PONG"
NUM_TOKENS = 64


def both_answers(base_url: str, model: str, model_folder: Path) -> dict[str, Any]:
    """The server's greedy answer to the PONG prompt, and transformers'."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    messages = [{"role": "user", "content": PONG_PROMPT}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        served = json.load(answer)["choices"][0]["message"]["content"]
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    own: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = own.generate(**ids, do_sample=False, max_new_tokens=NUM_TOKENS)
    text = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return {"server": served, "transformers": text, "same": served == text}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__)
    parser.add_argument("--tier", type=int, default=HIGHEST_TIER, help="highest tier to run")
    parser.add_argument("--version", default=VERSION, help=f"of the checker ({VERSION})")
    parser.add_argument("--model-folder", type=Path, help="the served model, for transformers")
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
        # How often each status is in the report, whatever its layout.
        told = report.read_text() if report.exists() else ""
        found = Counter(re.findall(r'"status":\s*"([^"]*)"', told))
    line: dict[str, Any] = {
        "tool": "trustedrouter-provider-check",
        "version": options.version,
        "model": model,
    }
    if options.model_folder is not None:
        line["pong"] = both_answers(options.base_url, model, options.model_folder)
    print(json.dumps({**line, "tier": options.tier, "status": status, "results": dict(found)}))
    return status


if __name__ == "__main__":
    sys.exit(main())
