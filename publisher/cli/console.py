"""What a person sees: progress on stderr, results on stdout.

A terminal gets a live line with a bar; anything else gets a plain line now and then. rich honours NO_COLOR and
the width of the terminal, and sends no codes into a pipe. A table that has no room becomes a list. A pipe has no width
of its own: lines are then left whole, unless COLUMNS says how wide they may be.

Text of any origin is escaped where it enters: in `_say`, `_show_rows`, `_show_facts` and the line of progress.
"""

import os
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.measure import Measurement
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.segment import Segment, Segments
from rich.table import Column, Table
from rich.text import Text

from publisher.border.escape import for_terminal
from publisher.records.audit import Audit
from publisher.records.explained import Explained
from publisher.records.extraction import ExtractionSummary
from publisher.records.filenames import CARD
from publisher.records.formats import count, figure, percent, percents, size
from publisher.records.loaders import LoaderVerdict, Repaired
from publisher.records.merged import Merged
from publisher.records.outcome import Outcome, VariantOutcome
from publisher.records.progress import Pace, Progress, amount
from publisher.records.publication import CommitPlan, PushOutcome, Signing
from publisher.records.verification import VerificationSet

_PIPE_WIDTH = 120  # a pipe has no width of its own
_WIDE, _BAR = 100, 24  # a line of progress has room for a bar, and how long that is
_READABLE = 24  # what a column of words takes at least
_NARROWEST = 20  # a column of text beside headings
_ENDLESS = 10_000  # a width in which any table has room
_PLAIN_INTERVAL = 5.0  # seconds between plain lines of the same kind of work


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """Yield a listener for the stages that shows progress on the console, for as long as the block runs."""
    if not console.is_terminal:
        yield _plain(console)
        return
    pace = Pace()
    what = TextColumn(
        "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    room = TextColumn("{task.fields[amount]}", markup=False), TextColumn("{task.fields[pace]}", markup=False)
    columns = (what, BarColumn(_BAR), *room) if console.width >= _WIDE else (what, *room)
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=None, amount="", pace="")

        def report(what: str, done: int = 0, total: int = 0) -> None:
            bar.update(
                task,
                description=for_terminal(what),
                completed=done,
                total=total or None,
                amount=amount(done, total) if total else "",
                pace=pace.describe(what, done, total),
            )

        yield report


def _plain(console: Console) -> Progress:
    last_shown: dict[str, float] = {}  # by kind of work
    pace = Pace()

    def report(what: str, done: int = 0, total: int = 0) -> None:
        kind = what.partition(" ")[0]
        now = time.monotonic()
        rate = pace.describe(what, done, total)
        if total and done and now - last_shown.get(kind, 0.0) < _PLAIN_INTERVAL:
            return
        last_shown[kind] = now
        parts = [amount(done, total)] if total else []
        parts += [rate] if rate else []
        _say(for_terminal(f"{what} ({', '.join(parts)})" if parts else what), console)

    return report


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Show the table of variants, the commit, and where the card is."""
    _set_width(console)
    extracted = [variant for variant in outcome.variants if variant.summary is not None]
    if extracted:
        _show_variants(extracted, console)
    for variant in extracted:
        _show_approximation(variant, console)
        _show_validation(variant, console)
        _show_loaders(variant, console)
    _show_verifications(extracted, console)
    for variant in outcome.variants:
        if variant.reused:
            _say(f"{variant.label}: reused {', '.join(variant.reused)}", console)
    _show_signature(outcome.signature, console)
    if outcome.plan is not None:
        show_plan(outcome.plan, console)
    if outcome.push is not None:
        _show_push(outcome.push, console)
        if outcome.push.hub.startswith("local Hub"):
            _show_reader_view(outcome, outcome.push, console)
    if outcome.card_changed is not None:
        state = "written" if outcome.card_changed else "unchanged"
        _say(f"card {state}: {Path(outcome.staged) / CARD}", console)


def _show_variants(variants: Sequence[VariantOutcome], console: Console) -> None:
    headings = ("variant", "linears", "layers", "relative error", "bit for bit", "adapter")
    rows = [_summary_row(variant.label, variant.summary) for variant in variants if variant.summary is not None]
    _show_rows(rows, console, headings=headings, words={"variant", "layers"})


def _summary_row(label: str, summary: ExtractionSummary) -> tuple[str, ...]:
    layers = f"{summary.layers} of {summary.layers_total}" if summary.layers_total else "-"
    error = percents((summary.relative_error.min, summary.relative_error.median, summary.relative_error.max))
    adapter = size(summary.adapter.size)
    linears = count(summary.linears)
    if summary.experts is not None:
        linears += f" + {count(summary.experts.changed)} {'matrices' if summary.experts.single else 'experts'}"
    return label, linears, layers, error, percent(summary.exact_share), adapter


def _show_verifications(variants: Sequence[VariantOutcome], console: Console) -> None:
    """Show base + adapter against the released model, and the FP8 base where it was tried."""
    headings = ("variant", "test set", "requests", "questions", "answers changed", "max KL", "failed")
    rows = [
        (
            variant.label,
            name,
            count(one.requests),
            count(one.questions),
            f"{percent(one.answers_changed_share)} ({one.answers_changed})",
            figure(one.max_kl),
            str(one.failed),
        )
        for variant in variants
        for name, one in _named_sets(variant)
    ]
    if rows:
        _show_rows(rows, console, headings=headings, words={"variant", "test set"})


def _named_sets(variant: VariantOutcome) -> list[tuple[str, VerificationSet]]:
    found = variant.verification
    on_fp8 = found.fp8.sets if found is not None and found.fp8 is not None else ()
    plain = [(one.name, one) for one in (found.sets if found is not None else ())]
    return [*plain, *((f"{one.name}, FP8 base", one) for one in on_fp8)]


def _show_approximation(variant: VariantOutcome, console: Console) -> None:
    summary = variant.summary
    if summary is not None and summary.approximation:
        text = f"{variant.label}: an approximation: the adapter holds {percent(summary.energy)} of the linears' update"
        _say(f"{text}, by squared norm; the update has no such low rank", console)


def _show_validation(variant: VariantOutcome, console: Console) -> None:
    seen = variant.validation
    if seen is None:
        return
    text = f"{variant.label}: PEFT loads all {seen.modules} modules, figures agree with extraction.json; "
    if seen.function is not None:
        compared, ratio = ", ".join(seen.function.outputs), percent(seen.function.ratio)
        text += f"{compared} {ratio} of the way from the source's to the base's"
    else:
        text += f"logits not compared: {seen.function_skipped}"
    _say(text, console)


def show_merged(done: Merged, console: Console) -> None:
    """Show what the merged checkpoint is, and how near to the released one."""
    experts = f" and {done.experts} parameters" if done.experts else ""
    _say(
        f"{done.folder}: {done.linears} linears{experts} merged; {done.shards} files of weights, {size(done.size)}",
        console,
    )
    if done.carried:
        _say(f"replaced whole: {done.carried} modules", console)
    if done.released:
        _say("the adapted weights are the released ones, bit for bit", console)
    elif done.share is not None:
        _say(f"{percent(done.share)} of the adapted weights are the released ones, bit for bit", console)
    for name in done.left_out:
        _say(f"as in the base, though the release differs: {name}", console)


def _show_loaders(variant: VariantOutcome, console: Console) -> None:
    if variant.loaders:
        taken, rest = ([one for one in variant.loaders if (one.loads == "yes") is well] for well in (True, False))
        text = f"{variant.label}: loads with {', '.join(map(_named, taken)) or 'none of the loaders'}"
        _say(f"{text}; not with {', '.join(one.loader for one in rest)}" if rest else text, console)


def _named(verdict: LoaderVerdict) -> str:
    return f"{verdict.loader} ({' '.join(verdict.flags)})" if verdict.flags else verdict.loader


def _show_signature(signature: Signing | None, console: Console) -> None:
    if signature is not None:
        why = f"; {signature.why}" if signature.why else ""
        _say(f"signature {signature.result}, by {signature.signer}{why}", console)


def _show_push(push: PushOutcome, console: Console) -> None:
    tag = f", tagged {push.tag}" if push.tag else ""
    found = " (its answer was lost; found by reading the repository again)" if push.recovered else ""
    _say(f"{push.hub}: {push.result}{tag}{found}: {push.url}", console)
    if (back := push.read_back) is not None:
        _say(f"read back {push.commit[:8]}: {back.files} files equal, {back.adapters} adapters load with PEFT", console)


def _show_reader_view(outcome: Outcome, push: PushOutcome, console: Console) -> None:
    """Show, after a rehearsal, the files at the commit, which are the staged ones, and how the card begins."""
    staged = Path(outcome.staged)
    _say(f"\na reader of the repository at {push.commit[:8]} sees:", console)
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    _show_rows([(file.relative_to(staged).as_posix(), size(file.stat().st_size)) for file in files], console)
    body = (staged / CARD).read_text(encoding="utf-8").split("---\n", 2)[-1].partition("\n## Usage")[0]
    if console.is_terminal:
        _show_markdown(body, console)
    else:
        _say(body, console)


def _show_markdown(text: str, console: Console) -> None:
    """Print Markdown as rich lays it out; it is escaped afterwards, since its entities give control characters too."""
    laid_out = console.render(Markdown(text, hyperlinks=False))
    console.print(Segments(Segment(for_terminal(text, lines=True), style) for text, style, _ in laid_out), end="")


def _say(text: str, console: Console) -> None:
    """Print a paragraph; in a known width it is broken between words, and a word that is longer is left whole."""
    text = for_terminal(text, lines=True)
    for line in text.split("\n") if _has_width(console) else (text,):
        for part in _broken(line, console.width) if _has_width(console) else (line,):
            console.print(part, highlight=False, soft_wrap=True, markup=False)


def _broken(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _has_width(console: Console) -> bool:
    return console.is_terminal or "COLUMNS" in os.environ


def _set_width(console: Console) -> None:
    if not _has_width(console):
        console.width = _PIPE_WIDTH


def _show_rows(
    rows: Sequence[Sequence[str | Text]],
    console: Console,
    *,
    headings: Sequence[str] = (),
    words: Collection[str] = (),
    flowing: Collection[str] = (),
) -> None:
    """Print a table; where it has no room, print a list: the first cell of each row and, below it, the others.

    rich would break every cell of a table that is too wide, and with it the paths and digests that a reader copies.

    Args:
        rows: cells of each row.
        console: where it is printed.
        headings: of the columns; without them the table has no header.
        words: headings of columns that stand to the left; others stand to the right.
        flowing: headings of columns whose cells may take several lines; those of the first may, too.
    """
    rows = [[_cell(cell) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE if headings else None, show_header=bool(headings), padding=(0, 1 if headings else 2))
    table.collapse_padding = bool(headings)
    for place, cells in enumerate(zip(*rows, strict=True)):
        heading = headings[place] if headings else ""
        flows = heading in flowing or bool(headings and place == 0)
        justify: Literal["left", "right"] = "left" if not headings or heading in words else "right"
        least = min(max(len(str(cell)) for cell in cells), _READABLE) if flows else None
        table.add_column(heading, justify=justify, no_wrap=not flows, min_width=least)
    for row in rows:
        table.add_row(*row)
    if Measurement.get(console, console.options.update_width(_ENDLESS), table).minimum <= console.width:
        console.print(table)
        return
    for row in rows:
        _show_stacked([str(cell) for cell in row], console, headings=headings)


def _cell(content: str | Text) -> Text:
    """Return a cell of a table, of text of any origin or of one of this module's own words in colour."""
    return Text(for_terminal(content)) if isinstance(content, str) else content


def _show_stacked(row: Sequence[str], console: Console, *, headings: Sequence[str]) -> None:
    first, *others = row
    if headings:
        _say(first, console)
        _show_facts([(f"  {name}", cell) for name, cell in zip(headings[1:], others, strict=True)], console)
    else:
        _say("  ".join(filter(None, row)), console)


def _show_facts(facts: Sequence[tuple[str, str]], console: Console) -> None:
    """Print a line for each fact, its heading before it; lines that follow stay to the right of the headings."""
    indent = 2 + max(len(heading) for heading, _ in facts)
    for heading, text in ((for_terminal(heading), for_terminal(text)) for heading, text in facts):
        room = console.width - indent - 1
        if not _has_width(console) or room < _NARROWEST:
            _say(f"{heading:<{indent}}{text}", console)
            continue
        for place, line in enumerate(_broken(text, room)):
            start = "" if place else heading
            console.print(f"{start:<{indent}}{line}", highlight=False, soft_wrap=True, markup=False)


def show_plan(plan: CommitPlan, console: Console) -> None:
    """Show each file of the commit that push would make."""
    _say(f"commit to {plan.repo}, compared with {plan.compared_with}:", console)
    rows = [
        (
            operation.change,
            operation.path,
            "" if operation.size is None else size(operation.size),
            (operation.sha256 or "")[:12],
        )
        for operation in plan.operations
    ]
    _show_rows(rows, console)


_LOADS = {"yes": "green", "no": "red", "wrongly": "bold red", "not told": "yellow"}


def show_compat(judged: Mapping[str, Sequence[LoaderVerdict]], console: Console) -> None:
    """Show the table of loaders for each adapter, then what speaks against one, and what helps."""
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    for label, verdicts in judged.items():
        _say(label, console)
        table = Table(box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
        for heading in ("loader", "rules of", "by", "loads", "scale", "flags"):
            table.add_column(heading, no_wrap=heading in {"loader", "loads", "scale"})
        for one in verdicts:
            loads = Text(one.loads, _LOADS[one.loads])
            words = (one.loader, one.version, one.basis, loads, one.scale, " ".join(one.flags))
            table.add_row(*(_cell(word) for word in words))
        console.print(table)
        for one in verdicts:
            for found in one.findings:
                _say(f"{one.loader}: {found.what}\n  {found.remedy}", console)
            for note in one.notes:
                _say(f"{one.loader}: {note}", console)


def show_repaired(done: Repaired, console: Console) -> None:
    """Show what was changed and what is left, then the verdicts on the adapter that was written."""
    for change in done.changes:
        _say(f"repaired: {change}", console)
    for left in done.left:
        _say(f"not repaired: {left}", console)
    _say("", console)
    show_compat(done.judged.verdicts, console)


_STYLES = {"passed": "green", "failed": "bold red", "not checked": "yellow"}


def show_audit(audit: Audit, console: Console) -> None:
    """Show the table of checks, then what is known of those that failed."""
    _set_width(console)
    rows = [
        (
            check.variant,
            check.name,
            Text(check.status, _STYLES[check.status]),
            check.detail.partition("\n")[0],
        )
        for check in audit.checks
    ]
    headings = ("variant", "check", "result", "seen")
    _show_rows(rows, console, headings=headings, words=headings, flowing={"seen"})
    for check in audit.failed:
        if "\n" in check.detail:
            _say(f"{check.variant} {check.name}: {check.detail}".strip(), console)
    counts = Counter[str](check.status for check in audit.checks)
    where = f"{audit.repo}@{audit.revision}" if audit.revision else audit.repo
    results = ", ".join(f"{counts[status]} {status}" for status in _STYLES)
    _say(f"{where}: {results}", console)


def show_module(found: Explained, console: Console) -> None:
    """Show one module's name and variant, then a line for each fact."""
    _say(f"{found.module}\nin {found.label}, variant {found.variant}\n", console)
    _show_facts(found.facts, console)
