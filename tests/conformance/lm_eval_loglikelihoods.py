"""lm_eval's log-likelihoods from a running server against lm_eval's own transformers backend.

    tailor models fetch smollm2-135m-instruct --form float32           # prints the model's folder
    tailor serve --weights float32
    python tests/conformance/lm_eval_loglikelihoods.py --base-url http://127.0.0.1:8000/v1 \\
        --model-folder FOLDER

Installs lm_eval (with torch and transformers as constraints.txt pins them) from the package index
at run time, and runs one small local task twice: `local-completions` over HTTP and `hf` on the same
weights, both in float32. Every document's log-likelihood of every choice must agree to 1e-3. The
server drafts as its task says: prompts are echoed with logprobs, as lm_eval asks. Exits 1 when one
differs by more; the last line is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environment import environment, options_of, run, served_model, work_folder

VERSION = "0.4.13"
TOLERANCE = 1e-3
TASK = "tailor_local"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

ITEMS = (
    ("The capital of France is", (" Paris", " Berlin", " a small village"), 0),
    ("Water boils at a temperature of", (" 100 degrees Celsius", " nine metres", " blue"), 0),
    ("Question: What do bees make?\nAnswer:", (" honey", " bread and butter", " steel"), 0),
    ("def add(a, b):\n    return", (" a + b", " a - b", " None"), 0),
    ("Die Katze sitzt auf dem", (" Tisch", " Tischtuch der Königin", " sieben"), 0),
    ("1, 2, 3, 4,", (" 5", " 7", " 1000000"), 0),
    ("Once upon a time there was a", (" king", " spreadsheet", "n otter"), 0),
    ("日本の首都は", ("東京", "大阪です", " Paris"), 0),
    ('{"name": "Ada", "born":', (" 1815}", ' "yesterday"}', " null, null}"), 0),
    ("SELECT name FROM users WHERE id =", (" 1;", " 'a' OR 1=1; --", "= 2"), 0),
    ("The opposite of hot is", (" cold", " not at all hot", " hot"), 0),
    ("A triangle has three", (" sides", " wheels and a horn", " 🦆"), 0),
)


def write_task(folder: Path) -> None:
    """The items and the task file that reads them."""
    lines = [
        json.dumps({"question": question, "choices": list(choices), "answer": answer})
        for question, choices, answer in ITEMS
    ]
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    (folder / f"{TASK}.yaml").write_text(
        f"task: {TASK}\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {folder / 'items.jsonl'}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{answer}}"\n'
        'target_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n"
    )


def likelihoods(folder: Path) -> dict[int, list[float]]:
    """Per document, the log-likelihood of each choice, of the samples that lm_eval logged."""
    (file,) = sorted(folder.rglob(f"samples_{TASK}_*.jsonl"))
    found: dict[int, list[float]] = {}
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        found[int(sample["doc_id"])] = [float(r[0][0]) for r in sample["resps"]]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__)
    parser.add_argument("--model-folder", type=Path, required=True, help="of the served weights")
    parser.add_argument("--version", default=VERSION, help=f"of lm_eval ({VERSION})")
    options = parser.parse_args(arguments)
    model = options.model or served_model(options.base_url)
    weights = options.model_folder.resolve()
    with work_folder(options.work_dir) as folder:
        python = environment(
            folder, "lm-eval", ["-c", str(CONSTRAINTS), f"lm_eval[hf,api]=={options.version}"]
        )
        write_task(folder)
        backends = {
            "local-completions": (
                f"model={model},base_url={options.base_url.rstrip('/')}/completions,"
                f"tokenizer_backend=huggingface,tokenizer={weights},tokenized_requests=True,"
                "num_concurrent=4,max_retries=1"
            ),
            "hf": f"pretrained={weights},dtype=float32",
        }
        told: dict[str, dict[int, list[float]]] = {}
        for backend, settings in backends.items():
            output = folder / f"samples-{backend}"
            for old in output.rglob("*.json*"):
                old.unlink()
            status = run(
                [
                    python, "-m", "lm_eval", "--model", backend, "--model_args", settings,
                    "--tasks", TASK, "--include_path", folder, "--output_path", output,
                    "--log_samples", "--device", "cpu", "--batch_size", "1",
                ],
                folder,
                HF_HUB_OFFLINE="1",
                OPENAI_API_KEY="none",
                HF_HOME=str(folder / "hf"),
            )  # fmt: skip
            if status:
                return status
            told[backend] = likelihoods(output)
    ours, truth = told["local-completions"], told["hf"]
    worst = max(abs(a - b) for doc in truth for a, b in zip(ours[doc], truth[doc], strict=True))
    for doc in sorted(truth):
        print(doc, [f"{a:.5f}/{b:.5f}" for a, b in zip(ours[doc], truth[doc], strict=True)])
    result = {
        "tool": "lm_eval", "version": options.version, "model": model, "documents": len(truth),
        "choices": sum(map(len, truth.values())), "worst_difference": worst,
        "tolerance": TOLERANCE,
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if sorted(ours) == sorted(truth) and worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
