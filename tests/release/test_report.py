"""The report's page, read as text; tests/browser looks at it in a browser."""

import re
from html.parser import HTMLParser

from publisher.records.extraction import Extraction
from publisher.release.evidence import Evidence, ReleaseEvidence
from publisher.release.report import render_report
from tests.factories import a_set, agreement, extraction, module, verification


def page(found: Extraction, *, title: str = "Title", summary: str = "A sentence.") -> str:
    return render_report(
        ReleaseEvidence(title, summary, "owner/name", (Evidence(extraction=found, verification=None),))
    )


class Reader(HTMLParser):
    """Every tag with its attributes, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def test_the_page_needs_nothing_but_itself() -> None:
    reader = read(page(extraction([module("layers.0.fc"), module("layers.1.fc")])))
    links = [value for _, attributes in reader.tags for key, value in attributes.items() if key in {"src", "href"}]
    assert [link for link in links if link and not link.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in page(extraction([module("layers.0.fc")]))


def test_every_module_is_a_row_with_its_figures_and_verdict() -> None:
    reader = read(page(extraction([module(f"model.layers.{n}.fc", ratio=1.0 + 4 * n) for n in range(3)])))
    names = [attributes["data-name"] for tag, attributes in reader.tags if tag == "th" and "data-name" in attributes]
    assert names == [f"model.layers.{n}.fc" for n in range(3)]
    assert "1 carried whole" in reader.text
    assert "2 hold more than the adapter" in reader.text
    assert "Modules below model.layers." in " ".join(reader.text.split())


def test_figures_have_the_forms_of_the_card() -> None:
    text = read(page(extraction([module("layers.0.fc", relative_error=0.0123), module("layers.1.fc")]))).text
    assert "1.23%" in text
    assert "80.00%" in text


def test_markup_in_a_name_a_title_or_a_label_is_shown_and_not_run() -> None:
    evil = '<img src=x onerror="alert(1)">'
    found = extraction([module(f"layers.0.{evil}")]).model_copy(update={"label": evil})
    reader = read(page(found, title=evil, summary=evil))
    assert [tag for tag, attributes in reader.tags if tag == "img" or "onerror" in attributes] == []
    assert reader.text.count(evil) >= 5


def test_a_verification_is_a_chart_and_a_table_and_its_absence_is_said() -> None:
    seen = verification(a_set("Set A", agreement("choice", mean=1e-5, most=1e-2)))
    found = extraction([module("layers.0.fc"), module("layers.1.fc")])
    with_it = render_report(ReleaseEvidence("T", "", "", (Evidence(extraction=found, verification=seen),)))
    assert "Set A: choice" in with_it
    assert '<td data-v="1200">1,200</td>' in with_it
    assert "No verification was run" not in with_it
    assert "No verification was run" in page(found)


def test_old_evidence_without_spectra_gets_a_page_without_them() -> None:
    text = page(extraction([module("layers.0.fc", spectra=False), module("layers.1.fc", spectra=False)]))
    assert "Spectrum and noise edge" not in text
    assert text.count('<td class="spark">–</td>') == 2


def test_the_same_evidence_gives_the_same_bytes_and_no_identifier_twice() -> None:
    found = extraction([module("layers.0.fc"), module("layers.1.fc")])
    both = ReleaseEvidence(
        "T", "", "", (Evidence(extraction=found, verification=None), Evidence(extraction=found, verification=None))
    )
    text = render_report(both)
    assert text == render_report(both)
    identifiers = re.findall(r'\sid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))
