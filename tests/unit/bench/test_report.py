"""A part that was measured on its own takes its place in the document, and nothing else of that changes."""

from bench import report
from bench.findings import Finding, Verdict

ABOUT = {"When": "today", "Commit": "abc", "Machine": "2 cores", "Load before": "1.0 1.0 1.0"}


def finding(name, measured):
    return Finding(name, f"Title of {name}", ["", "p50"], about=f"About {name}.", rows=[["row", measured]], verdicts=[
        Verdict(f"{name}: at most 5", measured, "5", float(measured) <= 5)
    ])  # fmt: skip


def test_a_part_is_added_and_put_in_place_of_itself():
    whole = report.document(ABOUT, [finding("one", "1"), finding("two", "2")])
    more = report.added(whole, {**ABOUT, "When": "tomorrow"}, [finding("three", "9")])
    assert more.startswith(whole.partition("## Targets")[0])
    assert [row for row in more.splitlines() if "at most" in row] == [
        "| one: at most 5 | 1 | 5 | reached |",
        "| two: at most 5 | 2 | 5 | reached |",
        "| three: at most 5 | 9 | 5 | **missed** |",
    ]
    assert more.count("Measured on its own: tomorrow") == 1
    again = report.added(more, ABOUT, [finding("three", "3")])
    assert again.count("## Title of") == 3
    assert "| three: at most 5 | 3 | 5 | reached |" in again
    assert "**missed**" not in again
    assert "Measured on its own: tomorrow" not in again
    assert (
        again.partition("## Title of one")[2].partition("## Title of three")[0]
        == more.partition("## Title of one")[2].partition("## Title of three")[0]
    )
