"""A page holds its values, and no text of them becomes HTML; its server answers this machine alone."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightning_stream.pages import chart, drawn_page, embedded, fields, figures, page, table, text
from lightning_stream.pages.server import Drawn, PageServer

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


def answer(given: Mapping[str, str], is_quick: bool) -> Drawn:
    nodes = float(given.get("nodes", 1))
    if nodes > 10:
        raise ValueError(f"nodes is at most 10; found {EVIL}")
    return [figures({"nodes": f"{nodes:g}", "quick": str(is_quick)})], {"y": [nodes]}


@pytest.fixture
def server() -> Iterator[PageServer]:
    nodes = {"name": "nodes", "label": "Nodes", "value": 1, "least": 1, "most": 10}
    with PageServer(0, "Test", fields([nodes]), answer) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def asked(server: PageServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, Any, str]:
    """The status, the type and the text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    found = connection.getresponse()
    result = found.status, found.headers["Content-Type"], found.read().decode()
    connection.close()
    return result


def test_the_server_answers_with_the_page_and_with_values(server: PageServer) -> None:
    status, kind, html = asked(server, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert [one["kind"] for one in embedded(html)["sections"]] == ["fields", "figures"]
    assert json.loads(asked(server, "/values?nodes=4")[2])["columns"] == {"y": [4.0]}
    assert json.loads(asked(server, "/quick?nodes=4")[2])["sections"][0]["items"][1] == ["True", "quick"]
    assert asked(server, "/", host=f"localhost:{server.server_port}")[0] == 200


def test_the_server_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_request_under_another_name_is_refused(server: PageServer, host: str) -> None:
    status, _, answered = asked(server, "/values?nodes=4", host=host)
    assert status == 403
    assert "columns" not in answered


@pytest.mark.parametrize("path", ["/etc/passwd", "/../../etc/passwd", "//etc/passwd", "/values/..", "/%2e%2e/x", "*"])
def test_the_server_reads_no_file(server: PageServer, path: str) -> None:
    assert asked(server, path)[0] in (404, 403)


@pytest.mark.parametrize(("error", "is_shown"), [(ConnectionResetError(), False), (RuntimeError("defect"), True)])
def test_a_browser_that_has_gone_is_no_error(
    server: PageServer, capsys: pytest.CaptureFixture[str], error: Exception, is_shown: bool
) -> None:
    try:
        raise error
    except Exception:  # noqa: BLE001 - as http.server does around each request
        server.handle_error(None, ("127.0.0.1", 1))
    assert bool(capsys.readouterr().err) == is_shown


def test_only_reading_requests_are_answered(server: PageServer) -> None:
    assert asked(server, "/values?nodes=4", method="POST")[0] == 501


@pytest.mark.parametrize("query", ["nodes=11", "nodes=", "nodes=x", f"nodes=11&x={'y' * 9000}"])
def test_a_value_that_a_rule_refuses_is_answered_with_the_rule(server: PageServer, query: str) -> None:
    status, _, answered = asked(server, f"/values?{query}")
    assert status in (400, 404)
    assert status == 404 or json.loads(answered)["error"]
