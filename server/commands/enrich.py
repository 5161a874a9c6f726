"""`tailor tasks enrich`, `tailor tasks analyze`: a task's own tokens, and whether they pay."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from server.commands.options import DEFAULT_MODEL, FieldOptions, OutputFile
from server.commands.progress import Bar
from server.datasets import open_table, read_examples
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes
    from vocab_store.enrichment import Enrichment

_FIELDS = FieldOptions()
_NODES = (0, 2, 4, 16)
_CLIENTS = (1, 8, 32)
_SEED = 20
DataFiles = Annotated[
    tuple[Path, ...],
    Parameter(metavar="FILE", help="JSON lines with a prompt and a completion; may be repeated"),
]


@dataclass(frozen=True, slots=True)
class TaskData:
    """A task's examples in ids, a part of them held back.

    table: the id -> bytes table; fingerprint: of the tokenizer (hex). barriers: ids that are never
    part of a token. vocab_size: rows of the model's tables; reserved_ids: rows without a token.
    """

    train: Sequence[tuple[list[int], list[int]]]
    held_out: Sequence[tuple[list[int], list[int]]]
    table: TokenBytes
    fingerprint: str
    barriers: frozenset[int]
    vocab_size: int
    reserved_ids: tuple[int, ...]


def read_task_data(
    folder: Path, files: Sequence[Path], fields: FieldOptions, *, max_held_out: int = 300
) -> TaskData:
    """The examples of `files`, shuffled by a fixed seed; a tenth is held back.

    folder: the model's. Raises ConfigError for files that cannot be read and for fewer than 20
    examples.
    """
    tokenizer, table, eos = open_table(folder)
    examples = [
        example
        for file in files
        for example in read_examples(file, fields.field, fields.prompt_field, tokenizer, eos)
    ]
    if len(examples) < 20:
        raise ConfigError(f"{', '.join(map(str, files))}: {len(examples)} examples; 20 are needed")
    random.Random(_SEED).shuffle(examples)
    num = min(max_held_out, len(examples) // 10)
    vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    return TaskData(
        train=examples[num:],
        held_out=examples[:num],
        table=table,
        fingerprint=table.fingerprint.hex(),
        barriers=frozenset({eos, *(int(i) for i in table.special_ids)}),
        vocab_size=vocab_size,
        reserved_ids=tuple(i for i in range(vocab_size) if i not in known),
    )


def mine_tokens(data: TaskData, budget: int, n_max: int, alpha: float, bar: Bar) -> Enrichment:
    from vocab_store.enrich import EnrichSettings
    from vocab_store.enrich import enrich as mine

    try:
        return mine(
            (output for _, output in data.train),
            data.table.bytes_of,
            tokenizer=data.fingerprint,
            base_vocab_size=data.vocab_size,
            settings=EnrichSettings(budget, n_max, alpha),
            barriers=data.barriers,
            reserved_ids=data.reserved_ids,
            progress=lambda done, total: bar("Tokens", done, total),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class MiningOptions:
    """Algorithm 1's parameters."""

    budget: Annotated[int, Parameter(name="--tokens", help="most new tokens (500)")] = 500
    n_max: Annotated[int, Parameter(help="longest n-gram of one merge (4)")] = 4
    alpha: Annotated[
        float, Parameter(help="prefix collision score a token must stay below (0.02)")
    ] = 0.02


_MINING = MiningOptions()


def enrich(
    *,
    data: DataFiles,
    output: OutputFile,
    model: Annotated[str, Parameter(help=f"whose tokenizer ({DEFAULT_MODEL})")] = DEFAULT_MODEL,
    fields: FieldOptions = _FIELDS,
    mining: MiningOptions = _MINING,
    show: Annotated[int, Parameter(help="print the first tokens that were found (12)")] = 12,
    reads_prompts: Annotated[
        bool,
        Parameter(
            negative=(), help="the model reads its prompts in these tokens, too, as in the paper"
        ),
    ] = False,
    export: Annotated[
        Path | None,
        Parameter(
            metavar="FOLDER",
            help="write the model with these as added tokens too, for transformers and vLLM",
        ),
    ] = None,
) -> int:
    from server.model.catalog import model_folder
    from server.model.gguf_folder import text_folder

    found = read_task_data(text_folder(model), data, fields)
    with Bar() as bar:
        enrichment = mine_tokens(found, mining.budget, mining.n_max, mining.alpha, bar)
    enrichment = replace(enrichment, prompts=reads_prompts)
    try:
        enrichment.save(output)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}") from None
    before = [output_ids for _, output_ids in found.held_out]
    after = [enrichment.segment(ids) for ids in before]
    ratio = sum(map(len, before)) / max(1, sum(map(len, after)))
    for parts in enrichment.parts[:show]:
        print(repr(found.table.join(parts, skip_special=False).decode(errors="replace")))
    print(
        f"{len(enrichment)} tokens; held-out answers take {_mean(after):.2f} ids instead of "
        f"{_mean(before):.2f} ({ratio:.2f}x fewer)"
    )
    if export is not None:
        from server.commands.export import export_model

        num_left = export_model(model_folder(model), enrichment, found.table, None, export)
        print(f"written: {export}; {num_left} tokens are no text by themselves and are not in it")
    print(f"written: {output}, next: tailor tasks train --enrichment {output}")
    return 0


def _mean(texts: Sequence[Sequence[int]]) -> float:
    return sum(map(len, texts)) / max(1, len(texts))


# --- analyze --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """What `analyze` found; `asdict` is its JSON."""

    examples: int
    entropies: dict[str, dict[str, float]] = field(default_factory=dict)
    ids_per_answer: dict[int, float] = field(default_factory=dict)
    passes: dict[str, dict[int, float]] = field(default_factory=dict)
    gains: dict[int, dict[str, float]] = field(default_factory=dict)
    distinct_output_ids: int = 0
    advice: list[str] = field(default_factory=list)


def analyze(
    *,
    data: DataFiles,
    model: Annotated[str, Parameter(help=f"whose tokenizer ({DEFAULT_MODEL})")] = DEFAULT_MODEL,
    fields: FieldOptions = _FIELDS,
    budgets: Annotated[
        tuple[int, ...], Parameter(name="--tokens", help="sizes of the enrichment that are tried")
    ] = (100, 250, 500, 1000),
    row_cost: Annotated[
        float,
        Parameter(help="what a further row costs, in steps of one row; see a server's log (0.06)"),
    ] = 0.06,
    as_json: Annotated[bool, Parameter(name="--json", help="print JSON instead")] = False,
) -> int:
    from server.model.gguf_folder import text_folder

    if not budgets or min(budgets) < 1 or row_cost < 0:
        raise ConfigError("--tokens must be at least 1 and --row-cost at least 0")
    found = read_task_data(text_folder(model), data, fields, max_held_out=100)
    with Bar() as bar:
        report = analyze_task(found, sorted(budgets), row_cost, bar)
    if as_json:
        print(json.dumps(asdict(report)))
        return 0
    for line in _lines(report):
        print(line)
    return 0


def analyze_task(data: TaskData, budgets: Sequence[int], row_cost: float, bar: Bar) -> _Report:
    """Measure a task's outputs, count forward passes, and suggest what would make it fast.

    Forward passes are counted by replaying held-out answers through `auto` with a corpus of the
    others, the first tree in the prefill pass. row_cost: a step of n rows takes 1 + row_cost x
    (n - 1) steps of one row.
    """
    from vocab_store.entropy import measure, ngrams

    report = _Report(len(data.train) + len(data.held_out))
    outputs = [ids for _, ids in data.train]
    largest = mine_tokens(data, budgets[-1], 4, 0.02, bar)
    chosen = min((b for b in budgets if b >= 500), default=budgets[-1])
    spellings = {"base": None, "enriched": largest.first(chosen)}
    for name, enrichment in spellings.items():
        texts = outputs if enrichment is None else [enrichment.segment(ids) for ids in outputs]
        found = measure(ngrams(texts, 1), vocab_size=data.vocab_size)
        pairs = measure(ngrams(texts, 2))
        report.entropies[name] = {
            "h1": found.h1, "h2": found.h2, "normalised_h1": found.normalised_h1,
            "k80": found.k80, "bigram_k80": pairs.k80,
        }  # fmt: skip
        report.passes[name] = count_passes(
            spelled(data.train, enrichment), spelled(data.held_out, enrichment), data.fingerprint,
            partial(bar, f"Replay, {name} ids"),
        )  # fmt: skip
    held = [ids for _, ids in data.held_out]
    report.ids_per_answer[0] = _mean(held)
    for budget in budgets:
        short = largest.first(budget)
        report.ids_per_answer[budget] = _mean([short.segment(ids) for ids in held])
    report.distinct_output_ids = len({i for ids in outputs for i in ids})
    for clients in _CLIENTS:
        report.gains[clients] = _gains(report.passes, clients, row_cost)
    report.advice = _advice(report, chosen, data.vocab_size)
    return report


def count_passes(
    train: Sequence[tuple[list[int], list[int]]],
    answers: Sequence[tuple[list[int], list[int]]],
    fingerprint: str,
    told: Callable[[int, int], None],
) -> dict[int, float]:
    """{draft nodes a pass: forward passes an answer}, the prefill pass counted.

    train, answers: (prompt, output) in the ids that the model reads and writes; the corpus is of
    the first, the second are replayed. fingerprint: of those ids (hex). told: called with (done, of
    how many).
    """
    from drafters import make_drafter
    from drafters.auto.held_out import build_calibrated
    from drafters.replay import Recording, replay

    corpus = build_calibrated(train, fingerprint=fingerprint)
    recordings = [Recording(prompt, output) for prompt, output in answers]
    passes: dict[int, float] = {}
    for done, nodes in enumerate(_NODES, 1):
        if nodes == 0:
            passes[0] = sum(len(r.output_ids) for r in recordings) / len(recordings)
        else:
            drafter = make_drafter("auto", corpus=corpus)
            result = replay(drafter, recordings, budget=nodes, in_prefill=True)
            passes[nodes] = 1.0 + sum(result.num_steps) / max(1, len(result.num_steps))
        told(done, len(_NODES))
    return passes


def spelled(
    examples: Sequence[tuple[list[int], list[int]]], enrichment: Enrichment | None
) -> Sequence[tuple[list[int], list[int]]]:
    """Prompts and outputs of base ids, as a drafter of an enrichment's ids reads them."""
    if enrichment is None:
        return examples
    return [(enrichment.segment(prompt), enrichment.segment(out)) for prompt, out in examples]


def _gains(passes: dict[str, dict[int, float]], clients: int, row_cost: float) -> dict[str, float]:
    """Answers a second against base ids without drafts, with the best of the node counts."""

    def cost(rows: float) -> float:
        return 1.0 + row_cost * (rows - 1.0)

    plain = passes["base"][0] * cost(clients)
    best = {
        name: min(n * cost(clients * (1 + nodes)) for nodes, n in by_nodes.items())
        for name, by_nodes in passes.items()
    }
    return {
        "drafting": plain / best["base"],
        "enrichment": plain / (passes["enriched"][0] * cost(clients)),
        "both": plain / best["enriched"],
    }


def _advice(report: _Report, tokens: int, vocab_size: int) -> list[str]:
    advice = []
    if report.gains[1]["drafting"] >= 1.1:
        advice.append(
            f"drafting: `tailor tasks tune`; {report.gains[1]['drafting']:.1f}x for one client"
        )
    share = report.distinct_output_ids / vocab_size
    if share <= 0.1:
        advice.append(f"slices: outputs use {share:.1%} of the vocabulary; `tailor vocab profile`")
    loaded = report.gains[32]["both"] / report.gains[32]["drafting"]
    if loaded >= 1.2:
        advice.append(
            f"enrichment with {tokens} tokens: {loaded:.1f}x over drafting alone at 32 clients; "
            "`tailor tasks enrich`, `tailor tasks train`"
        )
    return advice or ["nothing: these outputs neither repeat nor concentrate"]


def _lines(report: _Report) -> list[str]:
    lines = [f"{report.examples} examples, {report.distinct_output_ids} different output ids"]
    for name, e in report.entropies.items():
        lines.append(
            f"{name:9} H_1 {e['h1']:.2f}  H_2 {e['h2']:.2f} nats  K80 {e['k80']} ids, "
            f"{e['bigram_k80']} pairs"
        )
    curve = "  ".join(f"{b}: {n:.1f}" for b, n in report.ids_per_answer.items())
    lines.append(f"ids per answer by tokens added    {curve}")
    for name, passes in report.passes.items():
        row = "  ".join(f"{nodes}: {n:.2f}" for nodes, n in passes.items())
        lines.append(f"passes per answer by nodes, {name:9} {row}")
    lines.append("expected, against base ids without drafts:")
    for clients, gains in report.gains.items():
        row = "  ".join(f"{what} {gain:.2f}x" for what, gain in gains.items())
        lines.append(f"  {clients:2} clients  {row}")
    return [*lines, *(f"do: {line}" for line in report.advice)]
