"""`tailor tasks enrich`, `tailor tasks analyze`: a task's own tokens, and whether they pay."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from server.commands.data import DataFiles, FieldOptions, TaskData, read_task_data
from server.commands.options import (
    DEFAULT_MODEL,
    FOLDER,
    Bar,
    OutputFile,
    as_options,
    bounded,
    refused,
    writing,
)
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes
    from vocab_store.enrichment import Enrichment
    from vocab_store.entropy import Concentration, WordBigrams

BUDGETS = (50, 100, 250, 500, 1000)
ROW_COST = 0.06  # of a further row, in steps of one row

_FIELDS = FieldOptions()
_NODES = (0, 2, 4, 16)
_CLIENTS = (1, 8, 32)
_NEAR_BEST = 1.02  # answers so near to the shortest are as good
_WORTH_TRAINING = 1.2  # times faster, or shorter
_BIT = math.log(2)


def mine_tokens(
    data: TaskData, mining: MiningOptions, bar: Bar, *, reads_prompts: bool = False
) -> Enrichment:
    """The tokens that Algorithm 1 finds in the examples that are not held back; reads_prompts: in
    their prompts, too, which the model then reads in them. Raises ConfigError where there are
    none."""
    from vocab_store.enrichment import EnrichSettings, may_copy
    from vocab_store.enrichment import enrich as mine

    table = data.text.table
    known = set(data.text.tokenizer.get_vocab(with_added_tokens=True).values())
    copied = () if mining.copies else may_copy([prompt for prompt, _ in data.train])
    with refused():
        return mine(
            (output for _, output in data.train),
            table.bytes_of,
            tokenizer=data.text.fingerprint,
            base_vocab_size=table.vocab_size,
            settings=EnrichSettings(mining.budget, mining.n_max, mining.alpha, least=mining.least),
            barriers={data.text.eos, *table.special_ids.tolist()},
            reserved_ids=[i for i in range(table.vocab_size) if i not in known],
            copied=copied,
            prompts=(prompt for prompt, _ in data.train) if reads_prompts else None,
            progress=lambda done, total: bar("Tokens", done, total),
        )


def reading_pays(data: TaskData, enrichment: Enrichment) -> bool:
    """Whether held-out prompts are much shorter where they are read in the tokens."""
    prompts = [prompt for prompt, _ in data.held_out]
    return _mean(prompts) >= _WORTH_TRAINING * _mean([enrichment.segment(ids) for ids in prompts])


@as_options
class MiningOptions:
    """Algorithm 1's parameters, and what a model that learns few rows well needs beside it."""

    budget: Annotated[int, bounded("most new tokens (500)", name="--tokens", gte=1)] = 500
    n_max: Annotated[int, bounded("longest n-gram of one merge (4)", gte=2)] = 4
    alpha: Annotated[
        float, bounded("prefix collision score a token must stay below (0.02)", gt=0)
    ] = 0.02
    least: Annotated[
        int, bounded("answers that a token must stand in, or it is dropped (10; paper: 0)", gte=0)
    ] = 10
    copies: Annotated[
        bool,
        Parameter(
            negative=(),
            help="tokens may hold what answers copy from their prompts, as in the paper; a model "
            "copies best what it reads and writes in the same ids",
        ),
    ] = False


_MINING = MiningOptions()


def enrich(
    *,
    data: DataFiles,
    output: OutputFile,
    model: Annotated[str, Parameter(help=f"whose tokenizer ({DEFAULT_MODEL})")] = DEFAULT_MODEL,
    fields: FieldOptions = _FIELDS,
    mining: MiningOptions = _MINING,
    show: Annotated[int, bounded("print the first tokens that were found (12)", gte=0)] = 12,
    reads_prompts: Annotated[
        bool,
        Parameter(
            negative=(),
            help="the model reads its prompts in such tokens, too, as in the paper, and what they "
            "repeat is made tokens",
        ),
    ] = False,
    export: Annotated[
        Path | None,
        FOLDER,
        Parameter(
            metavar="FOLDER",
            help="write the model with these as added tokens too, for transformers and vLLM",
        ),
    ] = None,
) -> int:
    from server.model.catalog import model_folder

    if export is not None and export.exists() and any(export.iterdir()):
        raise ConfigError(f"{export}: is not empty")
    found = read_task_data(model, data, fields)
    with Bar() as bar:
        enrichment = mine_tokens(found, mining, bar, reads_prompts=reads_prompts)
    with writing(output):
        enrichment.save(output)
    for parts in enrichment.parts[:show]:
        print(repr(found.text.table.join(parts, skip_special=False).decode(errors="replace")))
    told = [f"{len(enrichment)} tokens"]
    for side, of in enumerate(("prompts", "answers")):
        if of == "prompts" and not reads_prompts:
            continue
        base = [example[side] for example in found.held_out]
        before, after = _mean(base), _mean([enrichment.segment(ids) for ids in base])
        told.append(
            f"held-out {of} take {after:.2f} ids instead of {before:.2f} "
            f"({before / max(after, 1e-9):.2f}x fewer)"
        )
    print("; ".join(told))
    if export is not None:
        num_left = export_model(model_folder(model), enrichment, found.text.table, export)
        print(f"written: {export}; {num_left} tokens are no text by themselves and are not in it")
    print(f"written: {output}, next: tailor tasks train --enrichment {output}")
    return 0


def _mean(texts: Sequence[Sequence[int]]) -> float:
    return sum(map(len, texts)) / max(1, len(texts))


# --- analyze --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """What `analyze` found; `asdict` is its JSON.

    words: Table 1 of TASC. ids_per_answer, entropies: by tokens added, 0 is the base; entropies of
    the ids of the outputs that are not held back, without the one that ends each. tau: Kendall's,
    of H_2 and ids an answer over these budgets; direction: the share of steps where H_2 rises and
    ids fall. recommended: the fewest tokens whose answers are within 2 % of the shortest. passes:
    forward passes an answer by draft nodes. gains: answers a second against base ids without
    drafts, by clients. lack: why it needs no tokens, "" where they pay.
    """

    examples: int
    ids_per_prompt: float
    distinct_output_ids: int
    words: WordBigrams
    ids_per_answer: dict[int, float] = field(default_factory=dict)
    entropies: dict[int, Concentration] = field(default_factory=dict)
    tau: float | None = None
    direction: float | None = None
    recommended: int = 0
    passes: dict[str, dict[int, float]] = field(default_factory=dict)
    gains: dict[int, dict[str, float]] = field(default_factory=dict)
    lack: str = ""
    advice: list[str] = field(default_factory=list)

    @property
    def tokens_pay(self) -> bool:
        """Whether tokens of its own make 32 clients faster than drafts do."""
        gains = self.gains[32]
        return self.recommended > 0 and gains["both"] >= _WORTH_TRAINING * gains["drafting"]


def analyze(
    *,
    data: DataFiles,
    model: Annotated[str, Parameter(help=f"whose tokenizer ({DEFAULT_MODEL})")] = DEFAULT_MODEL,
    fields: FieldOptions = _FIELDS,
    budgets: Annotated[
        tuple[int, ...], bounded("sizes of the enrichment that are tried", name="--tokens", gte=1)
    ] = BUDGETS,
    row_cost: Annotated[
        float,
        bounded("what a further row costs, in steps of one row; see a server's log (0.06)", gte=0),
    ] = ROW_COST,
    details: Annotated[bool, Parameter(help="the papers' measures too")] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="print JSON instead")] = False,
) -> int:
    found = read_task_data(model, data, fields, max_held_out=100)
    with Bar() as bar:
        report = analyze_task(found, sorted(budgets), row_cost, bar)
    if as_json:
        print(json.dumps(asdict(report)))
        return 0
    for line in (*_lines(report), *(_detail_lines(report) if details else ())):
        print(line)
    return 0


def analyze_task(
    data: TaskData, budgets: Sequence[int], row_cost: float, bar: Bar,
    mining: MiningOptions = _MINING,
) -> Report:  # fmt: skip
    """Measure a task's outputs, count forward passes, and suggest what would make it fast.

    Forward passes are counted by replaying held-out answers through `auto` with a corpus of the
    others, the first tree in the prefill pass. row_cost: a step of n rows takes 1 + row_cost x
    (n - 1) steps of one row.
    """
    from vocab_store.entropy import direction, kendall_tau, measure, ngrams, word_bigrams

    def text(ids: Sequence[int]) -> str:
        return data.text.table.join(ids, skip_special=True).decode(errors="replace")

    examples = [*data.train, *data.held_out]
    report = Report(
        len(examples),
        _mean([prompt for prompt, _ in examples]),
        len({i for _, output in data.train for i in output}),
        word_bigrams([text(p) for p, _ in examples], [text(o) for _, o in examples]),
    )
    spellings: dict[int, Enrichment | None] = {0: None}
    try:
        largest = mine_tokens(data, replace(mining, budget=budgets[-1]), bar)
        spellings |= {min(budget, len(largest)): largest.first(budget) for budget in budgets}
    except ConfigError:  # no n-gram becomes a token
        pass
    for budget, own in spellings.items():
        ends = {output[-1] for _, output in data.train if output}
        outputs = [output for _, output in spelled(data.train, own)]
        bodies = [ids[:-1] if ids and ids[-1] in ends else ids for ids in outputs]
        counts = ngrams(bodies, 1).values()
        report.entropies[budget] = measure(counts, vocab_size=data.text.table.vocab_size)
        report.ids_per_answer[budget] = _mean([o for _, o in spelled(data.held_out, own)])
    over = [(report.entropies[b].h2, report.ids_per_answer[b]) for b in spellings]
    report.tau, report.direction = kendall_tau(over), direction(over)
    shortest = min(report.ids_per_answer.values())
    report.recommended = min(
        b for b, ids in report.ids_per_answer.items() if ids <= shortest * _NEAR_BEST
    )
    for name, own in (("base", None), ("enriched", spellings[report.recommended])):
        report.passes[name] = count_passes(
            spelled(data.train, own), spelled(data.held_out, own), data.text.fingerprint,
            partial(bar, f"Replay, {name} ids"),
        )  # fmt: skip
    for clients in _CLIENTS:
        report.gains[clients] = _gains(report.passes, clients, row_cost)
    if not report.tokens_pay:
        report.lack = what_tokens_lack(data, bar, mining) or "drafts alone are nearly as fast"
    report.advice = _advice(report, data.text.table.vocab_size)
    return report


def what_tokens_lack(data: TaskData, bar: Bar, mining: MiningOptions = _MINING) -> str:
    """Why a model would learn no tokens of this data that make its answers much shorter: too few
    examples, with the number that is wanted, or answers that do not repeat; "" where it would."""

    def is_enough(least: int) -> bool:
        try:
            own = mine_tokens(data, replace(mining, least=least), bar)
        except ConfigError:
            return False
        outputs = [output for _, output in data.held_out]
        return _mean(outputs) >= _WORTH_TRAINING * _mean([own.segment(out) for out in outputs])

    if is_enough(mining.least):
        return ""
    for fewer in (mining.least // 2, 2):
        if 1 < fewer < mining.least and is_enough(fewer):
            wanted = math.ceil(len(data.train) * mining.least / fewer)
            return (
                f"too few rows for tokens: each is learned from {mining.least} answers, "
                f"about {wanted:,} rows are wanted"
            )
    return "answers repeat too little for tokens"


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


def _advice(report: Report, vocab_size: int) -> list[str]:
    advice = []
    alone = report.gains[1]["drafting"]
    if alone >= 1.1:
        advice.append(f"drafts: {alone:.1f} times the speed for one client; `tailor tasks tune`")
    if report.tokens_pay:
        loaded = report.gains[32]["both"] / report.gains[32]["drafting"]
        advice.append(
            f"{report.recommended} tokens of its own: {loaded:.1f} times the speed of drafts alone "
            f"at 32 clients; `tailor tasks enrich --tokens {report.recommended}`, then `tailor "
            "tasks train`; or all in one: `tailor tasks make`"
        )
    share = report.distinct_output_ids / vocab_size
    if share <= 0.1:
        advice.append(
            f"a slice of the LM head: answers use {share:.1%} of the vocabulary; "
            "`tailor vocab profile`"
        )
    if report.lack:
        advice.append(f"no tokens of its own: {report.lack}")
    return advice or ["nothing: these answers neither repeat nor concentrate"]


def _lines(report: Report) -> Iterator[str]:
    """For people who want their task fast."""
    ids, best = report.ids_per_answer, report.recommended
    yield (
        f"{report.examples:,} examples. A prompt has {report.ids_per_prompt:.0f} tokens, an answer "
        f"{ids[0]:.1f}."
    )
    yield ""
    if best:
        longer = [f"{b:,}" for b in ids if b > best]
        same = f" ({', '.join(longer)} give nothing that counts)" if longer else ""
        yield (
            f"{best:,} tokens of the task's own are enough: {ids[best]:.1f} tokens an answer, "
            f"{ids[0] / ids[best]:.1f} times fewer{same}."
        )
    yield "  own tokens      " + "".join(f"{b:>8,}" for b in ids)
    yield "  answer's length " + "".join(f"{n:>8.1f}" for n in ids.values())
    yield ""
    yield "Expected speed, without drafts and in the model's own tokens = 1:"
    yield "  clients     drafts  own tokens    both"
    for clients, gains in report.gains.items():
        row = f"{gains['drafting']:>10.1f} {gains['enrichment']:>10.1f} {gains['both']:>8.1f}"
        yield f"  {clients:>7} {row}"
    yield ""
    yield from (f"Do: {line}." for line in report.advice)


def _detail_lines(report: Report) -> Iterator[str]:
    """For people who know the papers."""
    words = report.words
    yield ""
    yield "TASC, table 1: word bigrams (what all prompts share is left out; bits)"
    for name, of in (("outputs", words.outputs), ("inputs", words.inputs)):
        yield f"  {name:8} H {of.bits:5.2f}   K80 {of.k80:>8,}   of {of.num:,}"
    yield f"  dH {words.delta_h / _BIT:.2f}, ratio of K80 {words.ratio:.1f}"
    yield ""
    yield "Output tokens by own tokens added (nats; without the one that ends an answer)"
    yield "  tokens     H_1    H_2   H_1 / ln V    K80   tokens an answer"
    for budget, e in report.entropies.items():
        yield (
            f"  {budget:>6,}  {e.h1:6.2f} {e.h2:6.2f} {e.normalised_h1:12.3f} {e.k80:6,}"
            f" {report.ids_per_answer[budget]:18.2f}"
        )
    if report.tau is not None and report.direction is not None:
        yield (
            f"  Kendall's tau of H_2 and length {report.tau:.2f}; where H_2 rises, answers shorten "
            f"in {report.direction:.0%} of the steps"
        )
    yield ""
    yield "Forward passes an answer by draft nodes a pass (the prompt's pass counted)"
    for name, passes in report.passes.items():
        row = "".join(f"  {nodes}: {n:.2f}" for nodes, n in passes.items())
        yield f"  {name:9}{row}"


# --- the model with these tokens, for transformers and vLLM ---------------------------------------

# There an enrichment's tokens are strings that the tokenizer cuts out of any text, prompts too
# (TASC-ft's own way; vocab_store.enrichment says what that costs). Their ids may differ from the
# enrichment's: a tokenizer numbers added tokens itself.

_KEPT = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer_config.json",
)  # beside what is written anew


def export_model(folder: Path, enrichment: Enrichment, table: TokenBytes, out: Path) -> int:
    """Write the model into `out`, with rows for the tokens as training begins with; the number of
    tokens that could not be added.

    table: of the base tokenizer. out: a new folder, or an empty one. Left out are tokens that are
    no text by themselves (half a character), and those that the tokenizer knows as one. Raises
    ConfigError and ModelError.
    """
    import torch

    from server.model.loader import build_module, open_model

    opened = open_model(folder)
    module: Any = build_module(opened, opened.dtype, torch.device("cpu"))
    out.mkdir(parents=True, exist_ok=True)
    added = _add_tokens(folder, enrichment, table, out)
    give_rows(module, added)
    module.save_pretrained(out)
    for name in _KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    return len(enrichment) - len(added)


def give_rows(module: Any, tokens: Mapping[int, Sequence[int]]) -> None:
    """Untie transformers' causal LM and give both tables rows for tokens, as training begins with.
    tokens: the base ids that each stands for, by its id."""
    import torch
    from torch import nn

    from server.training.lora import initial_rows

    sides: tuple[tuple[Any, Literal["input", "head"]], ...] = (
        (module.get_input_embeddings(), "input"),
        (module.get_output_embeddings(), "head"),
    )
    for table, side in sides:
        old = table.weight.detach()
        wide = old.new_zeros((max([old.shape[0], *(i + 1 for i in tokens)]), old.shape[1]))
        wide[: old.shape[0]] = old
        rows = initial_rows(lambda ids: old[ids].float(), list(tokens.values()), side=side)  # noqa: B023
        wide[torch.tensor(list(tokens), dtype=torch.int64)] = rows.to(old.dtype)
        table.weight = nn.Parameter(wide, requires_grad=False)
        module.config.vocab_size = module.vocab_size = wide.shape[0]
    module.config.tie_word_embeddings = False


def _add_tokens(
    folder: Path, enrichment: Enrichment, table: TokenBytes, out: Path
) -> dict[int, tuple[int, ...]]:
    """Write tokenizer.json; {the tokenizer's id: base ids} of what was added."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: dict[int, tuple[int, ...]] = {}
    for parts in enrichment.parts:
        data = table.join(parts, skip_special=False)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if tokenizer.token_to_id(text) is not None:
            continue
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
        added = tokenizer.token_to_id(text)
        if added is not None:
            ids[added] = parts
    tokenizer.save(str(out / "tokenizer.json"))
    return ids
