"""A page holds its values, and no text of them becomes HTML."""

from __future__ import annotations

import json

import pytest

from lightning_stream.pages import chart, drawn_page, embedded, page, table, text

EVIL = "</script><img src=x onerror=alert(1)><!--"


def test_a_page_gives_back_the_values_that_it_was_made_from() -> None:
    sections = [chart("A", "x", {EVIL: ("y", "x")}), table(EVIL, [EVIL], [[EVIL, 1]]), text(EVIL, EVIL)]
    html = drawn_page(EVIL, EVIL, sections, {"x": [1, 2], "y": [3.5, None]}, kept={"own": [EVIL]})
    values = embedded(html)
    assert values["sections"] == json.loads(json.dumps(sections))
    assert (values["columns"], values["kept"]) == ({"x": [1, 2], "y": [3.5, None]}, {"own": [EVIL]})
    assert "<img" not in html
    assert html.count("</script>") == 2


def test_infinite_numbers_are_gaps_since_json_has_none() -> None:
    html = drawn_page("", "", [], {"x": [1.0, float("inf"), float("nan")]})
    assert embedded(html)["columns"] == {"x": [1.0, None, None]}


def test_a_page_names_no_other_address() -> None:
    for html in (drawn_page("", "", [], {}), page("", "", "<p>text</p>")):
        assert "https:" not in html
        assert "default-src 'none'" in html
        assert [one for one in html.split('"') if one.startswith("http:")] in ([], ["http://www.w3.org/2000/svg"])


@pytest.mark.parametrize("html", ["", "<html></html>", '<script type="application/json" id="page">[]</script>'])
def test_a_page_of_another_kind_holds_no_values(html: str) -> None:
    with pytest.raises(ValueError, match="holds its values"):
        embedded(html)
