"""GETs of objects like one that boto3 has sent: botocore signs and sends them, at less than half of boto3's CPU.

For each request, boto3 looks up the endpoint, checks the arguments, calls handlers of events and parses all headers.
For the objects of one bucket only the key and the range differ. Errors are boto3's: where the answer is one, it sends
the request again and follows redirects, and the next GETs are like what it has sent then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

_REASON = re.compile(r"<(Code|Message)>([^<]*)<")
_MOST_REASON = 1000  # characters


class _Sent(NamedTuple):
    """What the GETs of a bucket have in common."""

    base_url: str
    headers: dict[str, str]
    context: dict[str, Any]  # how to sign it
    signer: Any


class ObjectGets:
    """Sends GETs through a client of boto3 (`client`). Thread-safe; all must be of one bucket."""

    def __init__(self, client: Any) -> None:
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import ClientError

        self.client = client
        self._request, self._error = AWSRequest, ClientError
        self._session = client._endpoint.http_session  # noqa: SLF001 - with its connections, proxies and certificates
        self._sent: _Sent | None = None
        client.meta.events.register_last("before-sign.s3.GetObject", self._note)

    def open(self, wanted: Mapping[str, str]) -> Any:
        """Send a GET with the arguments of boto3's `get_object`; return the response of urllib3, to be read."""
        if (sent := self._sent) is not None and (answer := self._send_like(sent, wanted)) is not None:
            return answer
        return self.client.get_object(**wanted)["Body"]._raw_stream  # noqa: SLF001 - `read` waits for all of a chunk

    def _note(self, request: Any, request_signer: Any, **_: object) -> None:
        """Keep what boto3 sends, before it is signed."""
        context = dict(request.context)
        if (arguments := context.pop("input_params", None)) is None:  # it is one of ours
            return
        path = "/" + _quoted(arguments["Key"])
        if request.params or not request.url.endswith(path):
            self._sent = None
            return
        headers = {name: value for name, value in request.headers.items() if name.lower() != "range"}
        self._sent = _Sent(request.url[: 1 - len(path)], headers, context, request_signer)

    def _send_like(self, sent: _Sent, wanted: Mapping[str, str]) -> Any:
        """Return the response to a GET like the one that was sent; None where boto3 is to send it."""
        headers = {**sent.headers, "Range": wanted["Range"]} if "Range" in wanted else sent.headers
        request = self._request("GET", sent.base_url + _quoted(wanted["Key"]), headers, stream_output=True)
        request.context = dict(sent.context)
        sent.signer.sign("GetObject", request)
        answer = self._session.send(request.prepare())
        status = answer.status_code
        if status in (200, 206):
            return answer.raw
        reason = answer.content[:_MOST_REASON].decode(errors="replace")  # which also gives the connection back
        if status == 429 or status >= 500:  # asking again at once would add to the server's trouble
            about = {"Code": str(status), "Message": reason, **dict(_REASON.findall(reason))}
            raise self._error({"Error": about, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")
        return None


def _quoted(key: str) -> str:
    return quote(key, safe="/~")
