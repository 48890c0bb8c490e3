"""The report and the card in a real browser; the screenshots in build/screenshots are for somebody to look at."""

import re
from pathlib import Path

import pytest

from tests.browser.chromium import SCREENSHOTS, Open

DESKTOP = {"width": 1400, "height": 900}
PHONE = {"width": 360, "height": 740}
WINDOWS = [
    pytest.param({**DESKTOP}, "desktop", id="desktop"),
    pytest.param({**DESKTOP, "dark": True}, "dark", id="dark"),
    pytest.param({**PHONE}, "phone", id="phone"),
    pytest.param({**PHONE, "dark": True}, "phone-dark", id="phone-dark"),
]
_FIRST_COLUMN = (
    "[...document.querySelectorAll('#t1 tbody tr')].map(row => row.cells[{}].dataset.v ?? row.cells[{}].innerText)"
)
_RANK, _ERROR = 3, 4
_CONTRAST = """(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const ratio = c => { const [a, b] = [light(c), ground].sort((x, y) => y - x); return (a + .05) / (b + .05) };
  return [...document.querySelectorAll('SELECTOR')].map(e => ratio(getComputedStyle(e).PROPERTY));
})()"""


@pytest.mark.parametrize(("window", "name"), WINDOWS)
def test_the_report_shows_without_complaint_and_fetches_nothing(
    opened: Open, report: Path, window: dict[str, int], name: str
) -> None:
    page = opened(report, **window)
    assert page.complaints() == []
    assert page.requests() == [report.resolve().as_uri()]
    page.screenshot(SCREENSHOTS / f"report-{name}.png", most=6000)


@pytest.mark.parametrize("width", [320, 360, 768, 1024])
def test_no_width_of_a_screen_makes_the_page_scroll_sideways(opened: Open, report: Path, width: int) -> None:
    page = opened(report, width=width, height=740)
    assert page.value("document.scrollingElement.scrollWidth") <= width
    assert page.value("[...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_the_ground_in_both_schemes(opened: Open, report: Path, dark: bool) -> None:
    page = opened(report, **DESKTOP, dark=dark)
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground))) < 60) == dark
    for selector, prop in (("p, td, th button, dt, figcaption", "color"), ("figure text", "fill")):
        assert min(page.value(_CONTRAST.replace("SELECTOR", selector).replace("PROPERTY", prop))) >= 4.5


def test_a_click_on_a_heading_sorts_by_number_and_another_one_turns_it_round(opened: Open, report: Path) -> None:
    page = opened(report, **DESKTOP)
    column = _FIRST_COLUMN.replace("{}", str(_ERROR))
    before = [float(v) for v in page.value(column)]
    heading = f"document.querySelector('#t1 thead').rows[0].cells[{_ERROR}]"
    page.value(f"{heading}.querySelector('button').click()")
    rising = [float(v) for v in page.value(column)]
    assert rising == sorted(before) != before
    assert page.value(f"{heading}.ariaSort") == "ascending"
    page.value(f"{heading}.querySelector('button').click()")
    assert [float(v) for v in page.value(column)] == rising[::-1]
    assert page.value(f"{heading}.ariaSort") == "descending"


@pytest.mark.parametrize("key", ["Enter", " "])
def test_the_keyboard_alone_reaches_a_heading_and_sorts(opened: Open, report: Path, key: str) -> None:
    page = opened(report, **DESKTOP)
    page.value("document.querySelector('input[data-table=t1]').focus()")
    for _ in range(2 + _RANK):  # the scrolling region, then the headings
        page.press("Tab")
    assert page.value("document.activeElement.textContent") == "rank"
    page.press(key)
    ranks = [int(v) for v in page.value(_FIRST_COLUMN.replace("{}", str(_RANK)))]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]
    assert page.value("document.activeElement.parentElement.ariaSort") == "ascending"


def test_names_sort_by_the_numbers_in_them(opened: Open, report: Path) -> None:
    page = opened(report, **DESKTOP)
    page.value("document.querySelector('#t2 th button').click()")
    names = page.value("[...document.querySelectorAll('#t2 tbody th')].map(e => e.dataset.name)")
    layers = [int(re.findall(r"layers\.(\d+)", name)[0]) for name in names]
    assert layers == sorted(layers)
    assert layers[-1] > 9


def test_the_filter_leaves_what_contains_the_word_and_says_how_many(opened: Open, report: Path) -> None:
    page = opened(report, **DESKTOP)
    page.value(
        "(() => { const i = document.querySelector('input[data-table=t1]'); i.value = 'self_attn';"
        " i.dispatchEvent(new Event('input')) })()"
    )
    shown = page.value("[...document.querySelectorAll('#t1 tbody tr')].filter(r => !r.hidden).map(r => r.innerText)")
    assert len(shown) == 24
    assert all("self_attn" in row for row in shown)
    assert page.value("document.querySelector('output').textContent") == "24 of 186"


def test_a_click_on_a_cell_of_the_map_finds_its_module_in_the_table(opened: Open, report: Path) -> None:
    page = opened(report, **DESKTOP)
    at = page.value(
        "(() => { const cell = document.querySelectorAll('#v1 figure svg [data-module]')[30];"
        " cell.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const box = cell.getBoundingClientRect();"
        " return [box.x + box.width / 2, box.y + box.height / 2, cell.textContent.trim().split('\\n')[0]] })()"
    )
    page.click(at[0], at[1])
    assert page.value("document.querySelector('tr.found').cells[0].dataset.name") == at[2]


def test_without_script_everything_is_there_to_read(opened: Open, report: Path) -> None:
    page = opened(report, **DESKTOP)
    page.command("Emulation.setScriptExecutionDisabled", value=True)
    page.load("Page.reload")
    assert page.value("document.querySelectorAll('#t1 tbody tr').length") == 186


@pytest.mark.parametrize(("window", "name"), [WINDOWS[0], WINDOWS[1], WINDOWS[2]])
def test_the_card_shows_its_charts(opened: Open, card: Path, window: dict[str, int], name: str) -> None:
    page = opened(card, **window)
    assert page.complaints() == []
    widths = page.value("[...document.images].map(image => image.naturalWidth)")
    assert widths == [720, 720, 720, 720]
    assert page.value("document.scrollingElement.scrollWidth") <= window["width"]
    page.screenshot(SCREENSHOTS / f"card-{name}.png", most=6000)
