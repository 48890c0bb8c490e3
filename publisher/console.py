"""What a person sees: progress on stderr, results on stdout.

A terminal gets a live line with a bar; anything else gets a plain line now and then. rich honours NO_COLOR and
the width of the terminal.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from publisher.artefacts import CARD
from publisher.progress import Progress
from publisher.records import Audit, CommitPlan, LoaderVerdict, Outcome, PushOutcome, Signing, Spread, VariantOutcome

_PIPE_WIDTH = 120  # a pipe has no width of its own
_PLAIN_INTERVAL = 5.0  # seconds between plain lines of the same kind of work


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """A listener for the stages, for as long as the block runs."""
    if not console.is_terminal:
        yield _plain(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done=0, total=0: bar.update(task, description=what, completed=done, total=total or None)


def _plain(console: Console) -> Progress:
    told: dict[str, float] = {}

    def tell(what: str, done: int = 0, total: int = 0) -> None:
        kind, now = what.partition(" ")[0], time.monotonic()
        if total and done and now - told.get(kind, 0.0) < _PLAIN_INTERVAL:
            return
        told[kind] = now
        console.print(f"{what} ({done}/{total})" if total else what, highlight=False, soft_wrap=True)

    return tell


def show_outcome(outcome: Outcome, console: Console) -> None:
    """The table of variants, the commit, and where the card is."""
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    told = [variant for variant in outcome.variants if variant.summary is not None]
    if told:
        console.print(_variants(told))
    for variant in told:
        _show_approximation(variant, console)
        _show_validation(variant, console)
        _show_loaders(variant, console)
    _show_verifications(told, console)
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


def _variants(variants: Sequence[VariantOutcome]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
    for heading in ("variant", "linears", "layers", "relative error", "bit for bit", "adapter"):
        justify: Literal["left", "right"] = "left" if heading in {"variant", "layers"} else "right"
        table.add_column(heading, justify=justify, no_wrap=heading != "variant")
    for variant in variants:
        if (summary := variant.summary) is not None:
            table.add_row(
                variant.label,
                str(summary.linears),
                f"{summary.layers} of {summary.layers_total}" if summary.layers_total else "-",
                spread(summary.relative_error),
                f"{summary.exact_share:.1%}",
                size(summary.adapter.size),
            )
    return table


def _show_verifications(variants: Sequence[VariantOutcome], console: Console) -> None:
    """Base + adapter against the released model, and the FP8 base where it was tried."""
    if not any(variant.verification for variant in variants):
        return
    table = Table(box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
    for heading in ("variant", "test set", "requests", "questions", "answers changed", "max KL", "failed"):
        words = heading in {"variant", "test set"}
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for variant in variants:
        if (found := variant.verification) is not None:
            on_fp8 = found.fp8.sets if found.fp8 else ()
            named = [*((one.name, one) for one in found.sets), *((f"{one.name}, FP8 base", one) for one in on_fp8)]
            for name, one in named:
                table.add_row(
                    Text(variant.label),
                    Text(name),
                    f"{one.requests:,}",
                    f"{one.questions:,}",
                    f"{one.answers_changed_share:.2%} ({one.answers_changed})",
                    f"{one.max_kl:.2g}",
                    str(one.failed),
                )
    console.print(table)


def _show_approximation(variant: VariantOutcome, console: Console) -> None:
    summary = variant.summary
    if summary is not None and summary.approximation:
        text = f"{variant.label}: an approximation: the adapter holds {summary.energy:.2%} of the linears' update"
        _say(f"{text}, by squared norm; the update has no such low rank", console)


def _show_validation(variant: VariantOutcome, console: Console) -> None:
    seen = variant.validation
    if seen is None:
        return
    text = f"{variant.label}: PEFT loads all {seen.modules} modules, figures agree with extraction.json; "
    if seen.function is not None:
        text += f"logits {seen.function.ratio:.1%} of the way from the source's to the base's"
    else:
        text += f"logits not compared: {seen.function_skipped}"
    _say(text, console)


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
    """After a rehearsal: the files at the commit, which are the staged ones, and how the card begins."""
    staged = Path(outcome.staged)
    _say(f"\na reader of the repository at {push.commit[:8]} sees:", console)
    table = Table(box=None, show_header=False, padding=(0, 2))
    for file in sorted(path for path in staged.rglob("*") if path.is_file()):
        table.add_row(file.relative_to(staged).as_posix(), size(file.stat().st_size))
    console.print(table)
    body = (staged / CARD).read_text(encoding="utf-8").split("---\n", 2)[-1].partition("\n## Usage")[0]
    if console.is_terminal:
        console.print(Markdown(body))
    else:
        _say(body, console)


def _say(text: str, console: Console) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def show_plan(plan: CommitPlan, console: Console) -> None:
    """Each file of the commit that push would make."""
    _say(f"commit to {plan.repo}, compared with {plan.compared_with}:", console)
    table = Table(box=None, show_header=False, padding=(0, 2))
    for operation in plan.operations:
        table.add_row(
            operation.change,
            operation.path,
            "" if operation.size is None else size(operation.size),
            (operation.sha256 or "")[:12],
        )
    console.print(table)


_LOADS = {"yes": "green", "no": "red", "wrongly": "bold red", "not told": "yellow"}


def show_compat(judged: Mapping[str, Sequence[LoaderVerdict]], console: Console) -> None:
    """The table of loaders for each adapter, then what speaks against one, and what helps."""
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    for label, verdicts in judged.items():
        _say(label, console)
        table = Table(box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
        for heading in ("loader", "rules of", "by", "loads", "scale", "flags"):
            table.add_column(heading, no_wrap=heading in {"loader", "loads", "scale"})
        for one in verdicts:
            loads = Text(one.loads, _LOADS[one.loads])
            table.add_row(one.loader, one.version, one.basis, loads, one.scale, Text(" ".join(one.flags)))
        console.print(table)
        for one in verdicts:
            for found in one.findings:
                _say(f"{one.loader}: {found.what}\n  {found.remedy}", console)
            for note in one.notes:
                _say(f"{one.loader}: {note}", console)


_STYLES = {"passed": "green", "failed": "bold red", "not checked": "yellow"}


def show_audit(audit: Audit, console: Console) -> None:
    """The table of checks, then what is known of those that failed."""
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    table = Table(box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
    for heading in ("variant", "check", "result", "seen"):
        table.add_column(heading, no_wrap=heading != "seen")
    for check in audit.checks:
        seen = Text(check.detail.partition("\n")[0])
        table.add_row(Text(check.variant), check.name, Text(check.status, _STYLES[check.status]), seen)
    console.print(table)
    for check in audit.failed:
        if "\n" in check.detail:
            text = f"{check.variant} {check.name}: {check.detail}".strip()
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    counts = Counter[str](check.status for check in audit.checks)
    where = f"{audit.repo}@{audit.revision}" if audit.revision else audit.repo
    told = ", ".join(f"{counts[status]} {status}" for status in _STYLES)
    console.print(f"{where}: {told}", highlight=False, soft_wrap=True)


def spread(figures: Spread) -> str:
    """Least, median and greatest, in per cent."""
    return " / ".join(f"{100 * value:.3g}" for value in (figures.min, figures.median, figures.max)) + " %"


def size(count: int) -> str:
    """Bytes in decimal units."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count} B"
